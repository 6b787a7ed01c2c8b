"""Emulates data-parallel ranks on one device: they train in turn with the single-device step."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, Optimizer, Scale, norm_of
from equivcheck.diagnosis.emulation.turns import NotTogether
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.training.accumulate import scalar_value
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import convert_batch, part_number_at
from equivcheck.user.diagnosis.diverged import DivergedTraining, parameters_by_name
from equivcheck.user.diagnosis.interception import intercept_backward, intercept_clipping, observe_clipping
from equivcheck.user.diagnosis.known_backward import KnownBackward, computation
from equivcheck.user.loop import default_step, train
from equivcheck.user.randomness import RowShard, seed_generators
from equivcheck.user.ranks import build_model
from equivcheck.user.task import Loss
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.optimizers import optimizers_in
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.trace import Snapshot, Trace


class EmulatedUserRanks(EmulatedRanks):
    """Ranks emulated on one device. Each has its own model, and trains with the user's single-device step."""

    def __init__(self, diverged: DivergedTraining, *, own_rows: bool, one: bool = False) -> None:
        self.diverged, self.task, self.own_rows = diverged, diverged.task, own_rows
        ranks = diverged.coordinates[:1] if one else diverged.coordinates
        parts = [part_number_at(self.task, rank.indices) for rank in ranks]
        shards = [RowShard(part, self.task.num_data_ranks) if own_rows else None for part in parts]
        models = [build_model(self.task, shard) for shard in shards]
        super().__init__(diverged, models, [parameters_by_name(model) for model in models], own_rows=own_rows)
        self.batches: list[Sequence[Any]] = list(diverged.shares if own_rows else [self.task.batches] * len(ranks))
        self.scale = self.task.loss_scale if own_rows else 1.0
        self.wraps_loss: Callable[[int, Loss], Loss] = lambda _rank, loss: loss
        """Function to replace a rank's loss function."""
        self.reads: Callable[[UserTrace], UserTrace] | None = None
        """Function that changes a rank's trace, for tensors read from wrong places."""
        self.num_seen = self.num_clippings = 0
        self.updates_in_backward = False
        """Whether a backward pass changed parameters, or left no gradients, because an optimizer stepped in it."""
        self.may_update_in_backward = one
        """Whether such a pass is accepted although gradients cannot be reduced."""
        self.num_updates = [0.0] * len(ranks)
        """Calls of each rank's optimizer; NaN if there are several, or if it computes the gradients itself."""
        self.losses: list[list[float]] = [[] for _ in ranks]
        """Each rank's losses in the current step, one for each backward pass that begins at a number."""
        self.known: KnownBackward | None = None
        """Backward passes of correct ranks."""
        self.require: Callable[[int, Phase, int, Gradients], None] | None = None
        """Function that raises an exception if values at a step and phase contradict those of a real rank."""
        self._computation = self._describe_computation()
        self._local = threading.local()
        self._count = [0] * len(ranks)

    def _describe_computation(self) -> tuple[Any, ...] | None:
        return computation(self.models, (*self.batches, self.task.step, self.wraps_loss, self.loss_weights))

    def current_step(self, rank: int) -> int:
        """Return the number of the step that a rank trains."""
        return self._step[rank]

    def each_optimizer(self, rank: int) -> Sequence[Optimizer]:
        """Return a rank's optimizers."""
        return optimizers_in(self.optimizers[rank])

    def train(self, num_steps: int) -> tuple[UserTrace, ...]:
        """Train `num_steps` steps, and return a trace for each emulated rank."""
        if self._computation is None or self._computation != self._describe_computation():
            self.known = None
        if self.reads is not None:
            self.require = None  # the values that are read differ from the parameters
        # Observed before it is intercepted, so that gradients are read after they are reduced.
        with (
            observe_clipping(),
            intercept_backward(self._backward),
            intercept_clipping(self._clip),
            seed_generators(self.task.seed),
        ):
            return tuple(self.turns.run(lambda rank: self._train_one(rank, num_steps)))

    def _train_one(self, rank: int, num_steps: int) -> UserTrace:
        self._local.rank = rank
        loss = _weighted(self.wraps_loss(rank, self.task.loss), self.loss_weights)
        task = replace(self.task, loss=loss, scheduler=self.task.scheduler and self._schedule)
        task = task.with_new_optimizers(partial(self._add_hooks, rank))
        reader = Reader(TensorNames(self.models[rank]), self.models[rank])
        with one_thread():
            batches = [convert_batch(batch, task.dtype) for batch in self.batches[rank][:num_steps]]
            trace = train(task, reader, batches, self._step_of(rank), self.scale)
        found = self.diverged.traces if len(self.models) == 1 else self.diverged.traces[rank : rank + 1]
        return self._as_reported(trace if self.reads is None else self.reads(trace), found)

    def _add_hooks(self, rank: int, optimizer: Optimizer) -> None:
        for each in optimizers_in(optimizer):
            each.register_step_pre_hook(lambda *_: self._call_events(self.before_reading, rank))
        self.optimizers[rank] = optimizer
        for change in self.built:
            change(rank, optimizer)

    def _schedule(self, optimizer: Any) -> Any:
        assert self.task.scheduler is not None, "the training has a schedule"
        scheduler = self.task.scheduler(optimizer)
        for change in self.schedules:
            change(scheduler)
        return scheduler

    def _step_of(self, rank: int) -> Any:
        own = self.task.step or default_step(self.task)
        hooked: list[Optimizer] = []

        def step(model: nn.Module, batch: Any, optimizer: Optimizer, loss: Loss) -> Any:
            if not hooked:  # registered after `train` has added its own hook, so that gradients are read first
                hooked.append(optimizer)
                for each in optimizers_in(optimizer):
                    each.register_step_pre_hook(lambda _, arguments, keywords: self._begin_update(rank, arguments, keywords))
                    each.register_step_post_hook(lambda *_: self._call_events(self.after_update, rank))
            self._count[rank], self.losses[rank] = 0, []
            self._call_events(self.before_step, rank)
            value = own(model, batch, optimizer, loss)
            if rank in self.at_end:
                self.at_end[rank]()
            value = self.returns(rank, value)
            self._end_step(rank)
            self._check(rank, self._step[rank] - 1, Phase.UPDATE, self.parameters[rank])
            return value

        return step

    def _begin_update(self, rank: int, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        has_closure = any(map(callable, (*arguments[1:], *keywords.values())))
        self.num_updates[rank] += math.nan if has_closure or len(self.each_optimizer(rank)) > 1 else 1.0
        if not (self.task.reads_unclipped or self.between_microbatches):
            self._check(rank, self._step[rank], Phase.GRADIENT, self.gradients(rank))
        self._call_events(self.before_update, rank)

    def _check(self, rank: int, step: int, phase: Phase, values: Gradients) -> None:
        """Compare a rank's values with the real rank's. If only this rank is emulated, compare with all real ranks."""
        if self.require is not None:
            for real in [rank] if len(self.models) > 1 else range(len(self.coordinates)):
                self.require(step, phase, real, values)

    def _backward(self, loss: torch.Tensor | None, backward: Callable[[], None]) -> None:
        rank = getattr(self._local, "rank", None)
        if rank is None:
            backward()
            return
        before, number = self.gradients(rank), self._count[rank]
        self.losses[rank] += [scalar_value(loss)] if loss is not None and loss.numel() == 1 else []
        fresh = self._fresh_gradients(rank, loss, backward)
        if self.updates_in_backward:
            if self.may_update_in_backward:
                return
            raise NotTogether("emulated ranks cannot reduce gradients, because the optimizer steps inside backward")
        with torch.no_grad():
            reduced = self._reduced(rank, before, fresh, number, last=number == self.num_backward - 1)
            for name, value in self.parameters[rank].items():
                value.grad = reduced.get(name)
        self._count[rank] += 1
        self.num_seen = max(self.num_seen, self._count[rank])
        if self._count[rank] == self.num_backward:
            self._end_backward(rank)
        elif self._count[rank] < self.num_backward:
            self._call_events(self.between_microbatches, rank)

    def _fresh_gradients(self, rank: int, loss: torch.Tensor | None, backward: Callable[[], None]) -> Gradients:
        """Return the gradients of one backward pass. The pass runs unless its gradients are known."""
        place = (self.own_rows, rank if self.own_rows else 0, self._step[rank], self._count[rank])
        known = None if self.known is None or loss is None else self.known.gradients(place, loss, self.models[rank])
        if known is not None:
            return known
        for value in self.parameters[rank].values():
            value.grad = None
        versions = self._versions(rank)
        backward()
        fresh = self.gradients(rank)
        self.updates_in_backward |= not fresh or versions != self._versions(rank)
        if not self.updates_in_backward and self.known is not None and loss is not None:
            self.known.add(place, loss, self.models[rank], fresh)
        return fresh

    def _versions(self, rank: int) -> list[int]:
        """Return the numbers of in-place operations on parameters, which torch counts for autograd."""
        return [value._version for value in self.parameters[rank].values()]

    def _clip(self, tensors: list[torch.Tensor], kind: float, scale: Scale) -> torch.Tensor:
        rank = getattr(self._local, "rank", None)
        if rank is None:
            norm = norm_of([tensor.grad for tensor in tensors if tensor.grad is not None], kind)
            scale(tensors, norm)
            return norm
        self.num_clippings += 1
        return self.clip_rank(rank, tensors, kind, scale)

    def _as_reported(self, trace: UserTrace, found: Sequence[Trace]) -> UserTrace:
        """Return the trace without the losses and state that the real ranks do not report."""
        steps = tuple(
            replace(own, loss=None) if all(other.steps[step].loss is None for other in found) else own
            for step, own in enumerate(trace.steps)
        )
        held = {piece.name for each in self.diverged.traces for piece in each.state.pieces}
        return replace(trace, steps=steps, state=_select_pieces(trace.state, held))


def _weighted(loss: Loss, weights: Sequence[float]) -> Loss:
    """Multiply each microbatch's loss by its weight."""
    if not weights:
        return loss
    factors = itertools.cycle(weights)
    return lambda outputs, targets: loss(outputs, targets) * next(factors)


def _select_pieces(snapshot: Snapshot, names: set[str]) -> Snapshot:
    kept, values, place = [], [], 0
    for number, (piece, there) in enumerate(zip(snapshot.pieces, snapshot.present, strict=True)):
        if piece.name in names:
            kept.append(number)
            values.append(snapshot.values[place : place + (piece.numel if there else 0)])
        place += piece.numel if there else 0
    return Snapshot(
        pieces=tuple(snapshot.pieces[number] for number in kept),
        present=tuple(snapshot.present[number] for number in kept),
        fits=tuple(snapshot.fits[number] for number in kept),
        dtypes=tuple(snapshot.dtypes[number] for number in kept),
        values=np.concatenate(values) if values else np.empty(0),
    )
