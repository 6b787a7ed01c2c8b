"""Emulates the ranks of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, Optimizer
from equivcheck.diagnosis.evidence import RankCoordinate
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.scenario import ClipNorm
from equivcheck.training.accumulate import microbatch_loss, scalar_value
from equivcheck.training.balance import Counts, of_microbatch_or_sequence, routing_counts
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.training.threads import one_thread
from equivcheck.training.update.clipping import clip_by_norm
from equivcheck.worlds.trace.trace import Trace


class ScenarioRanks(EmulatedRanks):
    """Emulated ranks in a scenario, each with its own `Setup`.

    With `one`, this is the single-device run, which then also rounds as the layout does.
    """

    def __init__(self, diverged: DivergedRun, *, own_rows: bool, one: bool = False) -> None:
        self.training, self.mesh = diverged.training, diverged.mesh
        rounding = diverged.rounding if one else None
        ranks = diverged.coordinates[:1] if one else diverged.coordinates
        self.setups: list[Setup] = [
            single_device_setup(self.training) if rounding is None else rounded_setup(self.training, rounding) for _ in ranks
        ]
        models = [setup.model for setup in self.setups]
        super().__init__(diverged, models, [dict(model.named_parameters()) for model in models], own_rows=own_rows)
        self.take: Callable[[RankCoordinate, Batch], Batch] = self.take_rows
        """Selects a rank's rows from a microbatch."""
        self.divides_by_own_rows = True
        """Whether a mean loss divides by the rows taken, not by the rows that the rank should have."""
        self.counted_over: tuple[str, ...] = self.mesh.names
        """Mesh axes over which ranks sum the expert counts of a step. Ranks with equal rows are counted several times."""
        self._counts: Counts = ()
        for rank, setup in enumerate(self.setups):
            setup.compute = partial(self._compute, rank) if rounding is None else partial(self._compute_rounded, setup.compute)
            if not one:
                setup.full_counts = lambda _model, own, *_given: of_microbatch_or_sequence(own, self._counts or own)
                setup.sum_counts = partial(self.exchange, rank, together=self._sums_of_counts)

    def take_rows(self, rank: RankCoordinate, batch: Batch) -> Batch:
        """Return a rank's rows of a batch. All ranks get equally many rows, but the last ranks may get fewer."""
        index, count = self._part(rank)
        size = -(-batch.rows // count)
        start = min(index * size, batch.rows)
        return take_range(batch, range(start, min(start + size, batch.rows)))

    def _part(self, rank: RankCoordinate) -> tuple[int, int]:
        """Return the index of the rank's part, and the number of parts."""
        index, count = 0, 1
        for name in self.axes:
            size = self.mesh.size(name)
            index, count = index * size + rank.indices[name], count * size
        return index, count

    def train(self, num_steps: int) -> tuple[Trace, ...]:
        """Train `num_steps` steps, and return a trace for each emulated model."""
        return tuple(self.turns.run(lambda rank: self._train_one(rank, num_steps)))

    def _train_one(self, rank: int, num_steps: int) -> Trace:
        setup = self.setups[rank]
        setup.span = range(num_steps)
        setup.build_optimizer = partial(self._build, rank, setup.build_optimizer)
        setup.before_training += [lambda _optimizer, schedule, change=change: change(schedule) for change in self.schedules]  # type: ignore[misc]
        setup.before_step.append(lambda _optimizer, _step: self._call_events(self.before_step, rank))
        if isinstance(self.training.clipping, ClipNorm) and setup.clip_norm is clip_by_norm:
            setup.clip_norm = partial(self._clip, rank)
        else:
            setup.before_update.append(lambda _optimizer, _step: self._call_events(self.before_reading, rank))
        setup.update = partial(self._update, rank, setup.update)
        with one_thread():
            return train(setup)

    def _build(self, rank: int, build: Callable[..., Optimizer], *given: Any) -> Optimizer:
        self.optimizers[rank] = build(*given)
        for change in self.built:
            change(rank, self.optimizers[rank])
        return self.optimizers[rank]

    def _clip(self, rank: int, _module: nn.Module, tensors: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        def scale(some: list[torch.Tensor], norm: torch.Tensor) -> None:
            nn.utils.clip_grads_with_norm_(some, clipping.max_norm, norm)

        norm = self.clip_rank(rank, tensors, float(clipping.norm_type.value), scale)
        self._call_events(self.before_reading, rank)
        return norm

    def _update(self, rank: int, update: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        self._call_events(self.before_update, rank)
        update(optimizer)
        self._call_events(self.after_update, rank)
        if rank in self.at_end:
            self.at_end[rank]()
        self._end_step(rank)

    def _compute(self, rank: int, _setup: Setup, microbatches: Sequence[Batch], index: int) -> Any:
        """Set a rank's gradients for one step, and return its loss."""
        total, gradients = 0.0, self.gradients(rank)
        for number, batch in enumerate(microbatches):
            self._count(rank, batch, index)
            loss, fresh = self._backward(rank, batch, number, index)
            with torch.no_grad():
                gradients = self._reduced(rank, gradients, fresh, number, last=number == len(microbatches) - 1)
            total += loss
            if self.between_microbatches and number < len(microbatches) - 1:
                gradients = self._between(rank, gradients)
        self._set_gradients(rank, gradients)
        return self.returns(rank, total)

    def _between(self, rank: int, gradients: Gradients) -> Gradients:
        """Call functions between two microbatches, and return the gradients that they leave."""
        for name, value in self.parameters[rank].items():
            value.grad = gradients.get(name)
        self._call_events(self.between_microbatches, rank)
        return self.gradients(rank)

    def _compute_rounded(self, inner: Callable[..., Any], setup: Setup, microbatches: Sequence[Batch], index: int) -> Any:
        """Let the reference compute a step's gradients, and reduce them once."""
        loss = inner(setup, microbatches, index)
        with torch.no_grad():
            self._set_gradients(0, self._reduced(0, {}, self.gradients(0), 0, last=True))
        return self.returns(0, loss)

    def _set_gradients(self, rank: int, gradients: Gradients) -> None:
        for name, value in self.parameters[rank].items():
            value.grad = gradients.get(name)
        self._end_backward(rank)

    def _count(self, rank: int, batch: Batch, index: int) -> None:
        """Count how often all ranks choose each expert.

        Ranks with equal rows may be counted twice, because only fractions matter.
        """
        if self.training.model.balances_microbatches and len(self.models) > 1:
            part = self.take(self.coordinates[rank], batch)
            counts = routing_counts(self.models[rank], part, index) if part.rows else []
            self.exchange(rank, counts, self._sum_counts)

    def _sum_counts(self, counts: list[Counts]) -> list[None]:
        of_layers = zip(*filter(len, counts), strict=True)
        self._counts = [torch.cat([own.view(-1, own.shape[-1]) for own in each]).sum(0) for each in of_layers]
        return [None] * len(counts)

    def _sums_of_counts(self, counts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum each rank's expert counts of a step over the ranks that count together."""
        peers = [self.peers(rank, self.counted_over) for rank in range(len(counts))]
        return [torch.stack([counts[peer] for peer in group]).sum(0) for group in peers]

    def _backward(self, rank: int, batch: Batch, number: int, index: int) -> tuple[float, Gradients]:
        """Return loss and gradients for a rank's rows, scaled such that their mean over ranks is the full gradient."""
        setup, coordinate = self.setups[rank], self.coordinates[rank]
        part, (_, count) = self.take(coordinate, batch), self._part(coordinate)
        for value in self.parameters[rank].values():
            value.grad = None
        if not part.rows:
            return 0.0, {}
        is_own = self.training.loss.is_mean and self.divides_by_own_rows
        setup.loss_scale = count
        loss = microbatch_loss(setup, part, index, part.rows * count if is_own else batch.rows)
        loss = loss * self.loss_weights[number % len(self.loss_weights)] if self.loss_weights else loss
        loss.backward()  # type: ignore[no-untyped-call]
        return scalar_value(loss), self.gradients(rank)


def take_range(batch: Batch, rows: range) -> Batch:
    """Return the rows `rows` of a batch, which are consecutive."""
    inputs, targets = (values.narrow(batch.batch_dim, rows.start, len(rows)) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else mask.narrow(0, rows.start, len(rows)) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)
