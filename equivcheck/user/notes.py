"""What is worth knowing of how the ranks of a user's training ran, and what they cannot show."""

from __future__ import annotations

from math import prod

from equivcheck.user.task import Task
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.trace.stage import Stage

COMPILED = "compiled functions ran in gloo: simulated ranks are threads, and would share what is compiled for one"
NOT_PARALLEL = (
    "no collective, and no parameter that is a shard, was seen: is the model parallel at all? (What asks the environment for "
    'RANK and WORLD_SIZE, as accelerate and Lightning do, wraps nothing in sim: world="gloo" has them)'
)
ONE_RANK = "one rank alone: nothing is spread, so that of reductions and shards this says nothing"
"""What is said of a mesh of one rank."""
ONE_STEP = "one step alone: what it leaves wrong for the next (state, a synchronisation that is lost) cannot show"
"""What is said of a single batch."""


def notes_on(task: Task, left: Run | Failure, asked: Ranks, ran: Ranks) -> tuple[str, ...]:
    """Notes on what some ranks left, where others may have been asked for."""
    notes = {COMPILED: ran.name != asked.name}
    if isinstance(left, Run):
        notes |= {
            NOT_PARALLEL: _sees_nothing_parallel(left),
            ONE_RANK: task.num_ranks == 1,
            ONE_STEP: len(task.batches) == 1,
        }
    return tuple(note for note, applies in notes.items() if applies)


def _sees_nothing_parallel(run: Run) -> bool:
    """Whether several ranks, in a world that sees calls, make none but for reading, and hold every parameter whole."""
    if len(run.values) == 1 or not run.calls or any(call.stage is not Stage.READING for calls in run.calls for call in calls):
        return False
    return all(piece.numel == prod(piece.shape) for trace in run.values for piece in trace.steps[0].parameters.pieces)
