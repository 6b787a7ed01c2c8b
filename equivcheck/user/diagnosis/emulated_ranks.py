"""Emulate data-parallel ranks on one device: each rank trains with the single-device step in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import convert_batch, part_number_at
from equivcheck.user.diagnosis.diverged import DivergedTraining, held_elements, parameters_by_name
from equivcheck.user.diagnosis.interception import intercept_backward, intercept_clipping, norm_of
from equivcheck.user.diagnosis.turns import NotTogether, Turns
from equivcheck.user.loop import default_step, train
from equivcheck.user.randomness import RowShard, seed_generators
from equivcheck.user.ranks import build_model
from equivcheck.user.task import Loss
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.optimizers import optimizers_in
from equivcheck.user.traces.reader import Reader
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.trace.trace import Snapshot

Optimizer = torch.optim.Optimizer
Event = Callable[[int, int], None]
"""Called with a rank and a step."""
Reduce = Callable[[list[Gradients], int, int], list[Gradients]]
"""Returns each rank's gradients, from the gradients on all ranks, the microbatch and the step."""
Norm = Callable[[int, Gradients, float], torch.Tensor]
"""Returns the norm for clipping, from a rank, its gradients and the norm type."""


class EmulatedUserRanks:
    """Trainings in one process that together compute the same as one device.

    A `Mistake` makes them wrong: it changes attributes before `train`. Every rank has full parameters. With `own_rows` it
    computes on its own rows, else on all rows.
    """

    def __init__(self, diverged: DivergedTraining, *, own_rows: bool) -> None:
        self.diverged, self.task = diverged, diverged.task
        self.held, self.coordinates = held_elements(diverged), diverged.coordinates
        self.batches: list[Sequence[Any]] = list(diverged.shares if own_rows else [self.task.batches] * self.task.num_ranks)
        self.scale = self.task.loss_scale if own_rows else 1.0
        self.axes = diverged.data_axes if own_rows else ()
        """Mesh axes along which gradients are averaged."""
        parts = [part_number_at(self.task, rank.indices) for rank in self.coordinates]
        shards = [RowShard(part, self.task.num_data_ranks) if own_rows else None for part in parts]
        self.models: list[nn.Module] = [build_model(self.task, shard) for shard in shards]
        self.parameters: list[dict[str, torch.Tensor]] = [parameters_by_name(model) for model in self.models]
        self.optimizers: dict[int, Optimizer] = {}
        self.turns = Turns(len(self.coordinates))

        self.reduce: Reduce = self.mean
        """Function called after each backward pass, with the gradients that this pass added."""
        self.norm: Norm = lambda _rank, gradients, kind: norm_of(gradients.values(), kind)
        """Function that computes the norm for each clipping."""
        self.clips_each = False
        """Whether each tensor is clipped by its own norm."""
        self.built: list[Callable[[int, Optimizer], None]] = []
        """Function called with each new optimizer."""
        self.before_step: list[Event] = []
        self.after_backward: list[Event] = []
        """Function called after the last backward pass in a step, before clipping."""
        self.after_clipping: list[Event] = []
        self.before_reading: list[Event] = []
        """Function called when the optimizer steps, before gradients are read."""
        self.before_update: list[Event] = []
        """Function called after gradients are read, before the update."""
        self.after_update: list[Event] = []
        self.at_end: dict[int, Callable[[], None]] = {}
        """Functions called after the user's step has returned; keys are ranks."""
        self.wraps_loss: Callable[[int, Loss], Loss] = lambda _rank, loss: loss
        self.returns: Callable[[int, Any], Any] = lambda _rank, value: value
        """Function that replaces the loss that a rank reports."""
        self.reads: Callable[[UserTrace], UserTrace] = lambda trace: trace
        """Function that changes a rank's trace, for tensors that are read from wrong places."""
        self.num_backward = diverged.num_microbatches
        """Backward passes per step."""
        self.num_seen = self.num_clippings = 0
        self._local = threading.local()
        self._count = [0] * len(self.coordinates)
        self._step = [0] * len(self.coordinates)

    def peers(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Return the ranks that differ from `rank` only along some axes, with `rank` itself."""
        own = self.coordinates[rank]
        return [other.rank for other in self.coordinates if other.differs_only_along(own, axes)]

    def mean(self, gradients: list[Gradients], _microbatch: int, _step: int) -> list[Gradients]:
        """Average gradients over ranks with different rows."""
        return [self.mean_over(gradients, self.peers(rank.rank, self.axes)) for rank in self.coordinates]

    @staticmethod
    def mean_over(gradients: Sequence[Gradients], ranks: Sequence[int]) -> Gradients:
        """Average gradients over some ranks. A missing gradient counts as zeros."""
        names = dict.fromkeys(name for rank in ranks for name in gradients[rank])
        return {
            name: torch.stack([gradients[rank][name] for rank in ranks if name in gradients[rank]]).sum(0) / len(ranks)
            for name in names
        }

    def gradients(self, rank: int) -> Gradients:
        """Return a rank's current gradients."""
        return {name: value.grad for name, value in self.parameters[rank].items() if value.grad is not None}

    def exchange(self, rank: int, given: Any, together: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait until all ranks gave a value, and return this rank's result from `together`."""
        return self.turns.meet(rank, given, together)

    def train(self, num_steps: int) -> tuple[UserTrace, ...]:
        """Train `num_steps` steps and return a trace per rank."""
        with intercept_backward(self._backward), intercept_clipping(self._clip), seed_generators(self.task.seed):
            return tuple(self.turns.run(lambda rank: self._train_one(rank, num_steps)))

    def _train_one(self, rank: int, num_steps: int) -> UserTrace:
        self._local.rank = rank
        loss = self.wraps_loss(rank, self.task.loss)
        task = replace(self.task, loss=loss).with_new_optimizers(partial(self._add_hooks, rank))
        reader = Reader(TensorNames(self.models[rank]), self.models[rank])
        with one_thread():
            batches = [convert_batch(batch, task.dtype) for batch in self.batches[rank][:num_steps]]
            trace = train(task, reader, batches, self._step_of(rank), self.scale)
        return self._as_reported(self.reads(trace), self.diverged.traces[rank])

    def _add_hooks(self, rank: int, optimizer: Optimizer) -> None:
        for each in optimizers_in(optimizer):
            each.register_step_pre_hook(lambda *_: self._call_events(self.before_reading, rank))
        self.optimizers[rank] = optimizer
        for change in self.built:
            change(rank, optimizer)

    def _step_of(self, rank: int) -> Any:
        own = self.task.step or default_step(self.task)
        hooked: list[Optimizer] = []

        def step(model: nn.Module, batch: Any, optimizer: Optimizer, loss: Loss) -> Any:
            if not hooked:  # registered after `train` has added its own hook, so that gradients are read first
                hooked.append(optimizer)
                for each in optimizers_in(optimizer):
                    each.register_step_pre_hook(lambda *_: self._call_events(self.before_update, rank))
                    each.register_step_post_hook(lambda *_: self._call_events(self.after_update, rank))
            self._count[rank] = 0
            self._call_events(self.before_step, rank)
            value = own(model, batch, optimizer, loss)
            if rank in self.at_end:
                self.at_end[rank]()
            value = self.returns(rank, value)
            self.exchange(rank, {name: value.data for name, value in self.parameters[rank].items()}, self._gather)
            self._step[rank] += 1
            return value

        return step

    def _gather(self, values: list[Any]) -> Sequence[None]:
        self.held.gather(values)
        self.held.take_from_owners(values)
        return [None] * len(values)

    def _call_events(self, events: Sequence[Event], rank: int) -> None:
        with torch.no_grad():
            for event in events:
                event(rank, self._step[rank])

    def _backward(self, backward: Callable[[], None]) -> None:
        rank = getattr(self._local, "rank", None)
        if rank is None:
            backward()
            return
        before = self.gradients(rank)
        for value in self.parameters[rank].values():
            value.grad = None
        backward()
        fresh, number, index = self.gradients(rank), self._count[rank], self._step[rank]
        if not fresh:
            raise NotTogether("the optimizer steps inside backward, so that no gradients are left to reduce")
        with torch.no_grad():
            reduced = self.exchange(rank, fresh, lambda all_: self.reduce(all_, number, index))
            for name, value in self.parameters[rank].items():
                parts = [gradients[name] for gradients in (before, reduced) if name in gradients]
                value.grad = sum(parts[1:], parts[0].clone()) if parts else None
        self._count[rank] += 1
        self.num_seen = max(self.num_seen, self._count[rank])
        if self._count[rank] == self.num_backward:
            self._call_events(self.after_backward, rank)

    def _clip(self, tensors: list[torch.Tensor], kind: float, scale: Any) -> torch.Tensor:
        rank = getattr(self._local, "rank", None)
        own = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
        if rank is None:
            norm = norm_of([gradient for _, gradient in own], kind)
            scale(tensors, norm)
            return norm
        self.num_clippings += 1
        names = {id(value): name for name, value in self.parameters[rank].items()}
        gradients = {names[id(tensor)]: gradient for tensor, gradient in own if id(tensor) in names}
        with torch.no_grad():
            norm = self.norm(rank, gradients, kind)
            if self.clips_each:
                for tensor, gradient in own:
                    scale([tensor], norm_of([gradient], kind))
            else:
                scale(tensors, norm)
        self.kind, self._scale = kind, scale
        self._call_events(self.after_clipping, rank)
        return norm

    def clip_again(self, rank: int, norm: torch.Tensor) -> None:
        """Scale a rank's gradients by a norm, as its last clipping did."""
        self._scale(list(self.parameters[rank].values()), norm)

    def _as_reported(self, trace: UserTrace, found: UserTrace | Any) -> UserTrace:
        """The trace without losses and state that the real ranks do not report."""
        steps = tuple(
            replace(own, loss=None) if other.loss is None else own for own, other in zip(trace.steps, found.steps, strict=False)
        )
        held = {piece.name for each in self.diverged.traces for piece in each.state.pieces}
        return replace(trace, steps=steps, state=_select_pieces(trace.state, held))


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
