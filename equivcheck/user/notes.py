"""Notes in a verdict: how ranks ran, and which errors the run cannot show."""

from __future__ import annotations

from math import prod

from equivcheck.user.task import Task
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.trace.stage import Stage

COMPILED = "your training ran in gloo because it compiles: simulated ranks are threads and would share compiled functions"
NOT_PARALLEL = (
    "your ranks made no collective call and hold no shard: is the model parallel at all? (Libraries that read RANK and "
    'WORLD_SIZE from the environment, such as accelerate and Lightning, wrap nothing in sim: use world="gloo")'
)
ONE_RANK = "the mesh has one rank, so this check says nothing about reductions or sharding"
"""Note on a mesh with one rank."""
ONE_STEP = "only one step: an error that affects the next step (optimizer state, a missing sync) cannot show"
"""Note on a training with one step."""


def notes_on(task: Task, left: Run | Failure, asked: Ranks, ran: Ranks) -> tuple[str, ...]:
    """Return notes on a run. `asked` are the ranks that the user asked for, `ran` those that ran."""
    notes = {COMPILED: ran.name != asked.name}
    if isinstance(left, Run):
        notes |= {
            NOT_PARALLEL: _sees_nothing_parallel(left),
            ONE_RANK: task.num_ranks == 1,
            ONE_STEP: len(task.batches) == 1,
        }
    return tuple(note for note, applies in notes.items() if applies)


def _sees_nothing_parallel(run: Run) -> bool:
    """Whether ranks neither communicated nor hold shards. Reading tensors for the check does not count as communication.

    False if there is one rank, or if the world does not record calls.
    """
    if len(run.values) == 1 or not run.calls or any(call.stage is not Stage.READING for calls in run.calls for call in calls):
        return False
    return all(piece.numel == prod(piece.shape) for trace in run.values for piece in trace.steps[0].parameters.pieces)
