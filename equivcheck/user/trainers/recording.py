"""Makes the trace of a trainer on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor

from equivcheck.training.read import pieces_of, snapshot
from equivcheck.user.batches import convert_batch, microbatches, rank_batch
from equivcheck.user.ranks import build_model, task_and_mesh
from equivcheck.user.resuming.parts import Part
from equivcheck.user.task import Task
from equivcheck.user.traces.reported import NOTHING, named_tensors, reported_snapshot
from equivcheck.user.traces.settings import UserTrace
from equivcheck.user.trainers.protocol import LocalPart
from equivcheck.user.usage import invalid
from equivcheck.worlds.marks import mark
from equivcheck.worlds.trace.stage import Stage
from equivcheck.worlds.trace.trace import Piece, Slot, Snapshot, Step


def trainer_trace(task: Task, part: Part) -> UserTrace:
    """Run the task's trainer on this rank and return its trace.

    Raises `UsageError` if the trainer recorded another number of updates than there are batches.
    """
    trainer = task.trainer
    assert trainer is not None, "asked for only with a trainer"
    if part.save is not None or part.load is not None:
        raise invalid("resume together with trainer", "a trainer owns its checkpoints", "only one of them")
    task, mesh = task_and_mesh(task)
    batches = [microbatches(rank_batch(task, convert_batch(batch, task.dtype), mesh)) for batch in task.batches]
    record = _RankRecord(num_steps=len(batches))
    mark(Stage.COMPUTE, 0)
    trainer.train(build_model(task), mesh, batches, task.loss, task.optimizer, record)
    return record.trace()


@dataclass(kw_only=True)
class _RankRecord:
    num_steps: int
    steps: list[Step] = field(default_factory=list)
    gradients: Snapshot | None = None
    state: Snapshot = NOTHING

    def before_update(self, parts: Sequence[LocalPart], *, scale: float = 1.0) -> None:
        """Record the gradients for the next update."""
        if self.gradients is not None:
            why = f"it called record.before_update twice before update {len(self.steps)}"
            raise invalid(
                "trainer", why, "one call of record.before_update for each update, with the gradients of all optimizers"
            )
        mark(Stage.READING, len(self.steps))
        found = _snapshot(parts)
        self.gradients = found if scale == 1.0 else replace(found, values=found.values / scale)
        mark(Stage.UPDATE, len(self.steps))

    def after_update(self, loss: float | None, parts: Sequence[LocalPart], *, norm: float | None = None) -> None:
        """Record a finished update: its loss, gradients, parameters and norm."""
        mark(Stage.READING, len(self.steps))
        reported = {} if norm is None else {"norm": norm}
        self.steps.append(
            Step(
                loss=None if loss is None else float(loss),
                gradients=NOTHING if self.gradients is None else self.gradients,
                clip_norm=None,
                clipped=None,
                parameters=_snapshot(parts),
                reported=reported_snapshot(named_tensors(reported)) if reported else None,
            )
        )
        self.gradients = None
        mark(Stage.COMPUTE, len(self.steps))

    def at_end(self, parts: Sequence[LocalPart]) -> None:
        """Record the optimizer state at the end."""
        self.state = _snapshot(parts)

    def trace(self) -> UserTrace:
        """Return the trace over all updates."""
        if len(self.steps) != self.num_steps:
            why = f"it recorded {len(self.steps)} updates for {self.num_steps} batches"
            raise invalid("trainer", why, "one call of record.after_update for each batch")
        return UserTrace(steps=tuple(self.steps), state=self.state, buffers=NOTHING, settings={})


def _snapshot(parts: Sequence[LocalPart]) -> Snapshot:
    rows = [_located(part) for part in parts]
    slots = [Slot(parameter=tensor, pieces=pieces) for tensor, pieces in rows]
    return snapshot(slots, tuple(piece for slot in slots for piece in slot.pieces), [tensor for tensor, _ in rows])


def _located(part: LocalPart) -> tuple[torch.Tensor, tuple[Piece, ...]]:
    tensor = part.tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor, pieces_of(part.name, tensor)
    if part.offset is not None:
        flat = tensor.reshape(-1)
        return flat, (Piece(name=part.name, shape=part.shape, run=(part.offset, flat.numel())),)
    if part.start:
        return tensor, (Piece(name=part.name, shape=part.shape, start=part.start, size=tuple(tensor.shape)),)
    if tuple(tensor.shape) != part.shape:
        why = f"its tensor has the shape {tuple(tensor.shape)}, and its position in {part.shape} is not given"
        raise invalid(f"part {part.name!r}", why, "the full tensor, or a start or offset for a part of it")
    return tensor, (Piece(name=part.name, shape=part.shape),)
