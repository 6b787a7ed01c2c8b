"""Writes notes for a verdict, and reasons why agreement between ranks and one device is not a proof."""

from __future__ import annotations

from math import prod

import torch

from equivcheck.user.batches import tensors_of
from equivcheck.user.messages.no_update import reason_for_no_update
from equivcheck.user.task import Task
from equivcheck.user.trainers.tried import untried_versions
from equivcheck.worlds.failure import Failure
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.trace.stage import Stage

COMPILED = "your training ran in gloo because it compiles: simulated ranks are threads and would share compiled functions"
NOT_PARALLEL = (
    "your ranks made no collective call in a step and hold no shard: is the model parallel at all? If `parallelize` wraps it, it "
    "must return the wrapper. (Libraries that read RANK and WORLD_SIZE from the environment, such as accelerate and Lightning, "
    'wrap nothing in sim: use world="gloo")'
)
OUTSIDE = (
    "not compared: the state of {names}, which your step keeps outside the model. To compare it, pass "
    "also=lambda model, optimizer: {{name: object}}"
)
"""Note on state outside the model."""
FAILED_BEFORE = "your ranks failed before they started again from the checkpoint"
FAILED_AFTER = "your ranks failed after they started again from the checkpoint"
ONE_RANK = "the mesh has one rank, so this check says nothing about reductions or sharding"
"""Note on a mesh with one rank."""
ONE_STEP = "only one step: an error that affects the next step (optimizer state, a missing sync) cannot show"
"""Note on a training with one step."""
SAME_ROWS = "all data ranks got the same rows in every batch, so a missing reduction cannot show: use batches with different rows"
"""Reason why agreement proves nothing if all data ranks got the same rows."""


def notes_on(  # noqa: PLR0913 - a run, and where it ran
    task: Task, left: Run | Failure, asked: Ranks, ran: Ranks, *, outside: tuple[str, ...] = (), has_restarted: bool = False
) -> tuple[str, ...]:
    """Return the notes for a verdict: what this check could not show.

    `left` is the finished run, or the failure that ended it. The user requested the ranks `asked`, but the training may have run
    on other ranks, `ran`. `outside` names objects whose state is not compared. If ranks failed, `has_restarted` says whether they
    had loaded a checkpoint before.
    """
    fails = task.resume is not None and isinstance(left, Failure)
    notes = {
        COMPILED: ran.name != asked.name,
        FAILED_BEFORE: fails and not has_restarted,
        FAILED_AFTER: fails and has_restarted,
    }
    if isinstance(left, Run):
        notes |= {
            NOT_PARALLEL: _sees_nothing_parallel(left),
            ONE_RANK: task.num_ranks == 1,
            ONE_STEP: len(task.batches) == 1,
            OUTSIDE.format(names=", ".join(outside)): bool(outside),
        }
    return (*(note for note, applies in notes.items() if applies), *untried_versions(task.trainer))


def _sees_nothing_parallel(run: Run) -> bool:
    """Whether ranks neither communicated in steps nor hold shards. Reading tensors for the check does not count as communication.

    False if there is one rank, or if the world does not record calls.
    """
    communicates = any(call.stage in (Stage.COMPUTE, Stage.UPDATE) for calls in run.calls for call in calls)
    if len(run.values) == 1 or not run.calls or communicates:
        return False
    return all(piece.numel == prod(piece.shape) for trace in run.values for piece in trace.steps[0].parameters.pieces)


def missing_evidence(task: Task, *, changes_parameters: bool) -> str:
    """Return the reason why the verdict cannot be EQUIVALENT although all values agree.

    Empty if the agreement is enough evidence.
    """
    if not changes_parameters:
        return reason_for_no_update(task)
    return SAME_ROWS if _same_rows(task) else ""


def _same_rows(task: Task) -> bool:
    """Whether all data ranks get the same rows in every batch. False if the user shards, because the parts are unknown."""
    if task.num_data_ranks == 1 or task.shard is not None:
        return False
    parts = (tensor.chunk(task.num_data_ranks) for batch in task.batches for tensor in tensors_of(batch) if tensor.dim())
    first = next(parts, ())
    return bool(first) and _all_same(first) and all(map(_all_same, parts))


def _all_same(parts: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(parts[0], part) for part in parts[1:])
