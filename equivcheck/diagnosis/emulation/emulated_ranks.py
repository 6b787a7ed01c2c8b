"""All ranks' trainings, run in lockstep on one device.

Each training holds full parameters and computes on its rank's rows. At a communication point the trainings pause. Gradients are
then reduced by plain arithmetic, and each training copies the elements it would not hold from a training that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.coordinates import RankCoordinate, rank_coordinates
from equivcheck.diagnosis.emulation.held_elements import held_elements_of
from equivcheck.layouts.base.rounding import Division
from equivcheck.layouts.composition.registry import when_reduced
from equivcheck.oracle.reference.reduction import AccumulatedGradients, Averaging, Gradients
from equivcheck.training.accumulate import microbatch_loss, scalar_value
from equivcheck.training.balance import Counts, routing_counts
from equivcheck.training.loop import Pause, train_in_turns
from equivcheck.training.material import Batch, material
from equivcheck.training.setup import Setup
from equivcheck.training.single_device import single_device_setup
from equivcheck.worlds.trace.trace import Trace

Parameters = dict[str, torch.nn.Parameter]
"""One rank's parameters by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How a tensor's gradient is reduced over ranks."""

    axes: tuple[str, ...]
    """Axes to average over; empty for no reduction."""
    factor: float = 1.0
    """The mean is multiplied by this factor."""


class EmulatedRanks:
    """One training per rank, which together compute the single-device run. A counterfactual changes attributes before `train`."""

    def __init__(self, diverged: DivergedRun) -> None:
        self.training = diverged.training
        self.mesh = diverged.mesh
        self.coordinates = rank_coordinates(self.mesh)
        self.held = held_elements_of(diverged)
        self.setups: list[Setup] = [single_device_setup(self.training) for _ in self.coordinates]
        self._counts: Counts = ()
        for setup in self.setups:
            setup.full_counts = lambda *_given: self._counts

        self.data_axes = diverged.data_axes
        """Axes along which ranks compute on different rows, outermost first."""
        self.take: Callable[[RankCoordinate, Batch], Batch] = self.take_rows
        """Selects a rank's rows from a microbatch."""
        self.divides_by_own_rows = True
        """Whether a mean loss divides by the rows taken, not by the rows that the rank should have."""
        self.weight_of: Callable[[RankCoordinate, int], float] = lambda _rank, _microbatch: 1.0
        """Factor for a rank's gradients in a microbatch."""

        self.when_reduced = when_reduced(diverged.layout)
        """When gradients are reduced if there are several microbatches."""
        self.reductions: dict[str, Reduction] = {}
        """Reductions for some parameters by name; other gradients are averaged over all data axes."""
        self.unreduced_microbatches: frozenset[int] = frozenset()
        """Microbatches whose gradients stay local to each rank."""
        self.reduces_in: torch.dtype | None = None
        """Element type for the reduction; None for the gradients' own."""
        self.division = Division.BEFORE
        """Whether gradients are divided before or after they are summed over ranks."""
        self.before_reducing: list[Callable[[Gradients], None]] = []
        """Called with each rank's gradients before each reduction."""

    def take_rows(self, rank: RankCoordinate, batch: Batch) -> Batch:
        """A rank's rows. All ranks have nearly equally many."""
        index, count = self._part(rank)
        size = -(-batch.rows // count)
        start = min(index * size, batch.rows)
        return take_range(batch, range(start, min(start + size, batch.rows)))

    def _part(self, rank: RankCoordinate) -> tuple[int, int]:
        """Index of the rank's part, and number of parts."""
        index, count = 0, 1
        for name in self.data_axes:
            size = self.mesh.size(name)
            index, count = index * size + rank.indices[name], count * size
        return index, count

    def peers(self, rank: RankCoordinate, axes: Sequence[str]) -> list[int]:
        """Ranks with `rank`'s coordinate except along the given axes; includes `rank`."""
        return [other.rank for other in self.coordinates if other.differs_only_along(rank, axes)]

    def train(self, num_steps: int) -> tuple[Trace, ...]:
        """Train for `num_steps` steps and return one trace per rank."""
        models: list[Parameters] = [dict(setup.model.named_parameters()) for setup in self.setups]
        losses = [0.0] * len(self.setups)
        running = []
        for rank, setup in enumerate(self.setups):
            setup.span, setup.compute = range(num_steps), partial(_loss_of_rank, losses, rank)
            running.append(train_in_turns(setup))
        for index, batches in enumerate(material(self.training).steps[:num_steps]):
            _advance(running)
            self._compute(models, losses, batches, index)
            _advance(running)
            values = [{name: parameter.data for name, parameter in model.items()} for model in models]
            self.held.gather(values)
            self.held.take_from_owners(values)
        return tuple(map(_finished, running))

    def _compute(self, models: list[Parameters], losses: list[float], batches: Sequence[Batch], index: int) -> None:
        """Set each rank's gradients and loss for one step."""
        gradients = AccumulatedGradients(
            [{name: value.grad for name, value in model.items() if value.grad is not None} for model in models],
            self._reduced,
            when=self.when_reduced,
        )
        losses[:] = [0.0] * len(losses)
        for number, batch in enumerate(batches):
            is_local = number in self.unreduced_microbatches
            self._count(batch, index)
            for rank, model in zip(self.coordinates, models, strict=True):
                loss, fresh = self._backward(rank, model, batch, index)
                losses[rank.rank] += loss
                weight = self.weight_of(rank, number)
                fresh = fresh if weight == 1.0 else {name: value * weight for name, value in fresh.items()}
                (gradients.add_unreduced if is_local else gradients.add)(rank.rank, fresh)
            if not is_local:
                gradients.end_microbatch(last=number == len(batches) - 1)
        self.held.gather(gradients.reduced)
        for model, reduced in zip(models, gradients.reduced, strict=True):
            for name, value in model.items():
                value.grad = reduced.get(name)

    def _count(self, batch: Batch, index: int) -> None:
        """Count how often all ranks choose each expert. Ranks with equal rows may count twice, because only shares matter."""
        if self.training.model.balances:
            parts = [(setup.model, self.take(rank, batch)) for rank, setup in zip(self.coordinates, self.setups, strict=True)]
            of_ranks = [routing_counts(model, part, index) for model, part in parts if part.rows]
            self._counts = [torch.stack(each).sum(0) for each in zip(*of_ranks, strict=True)]

    def _backward(self, rank: RankCoordinate, model: Parameters, batch: Batch, index: int) -> tuple[float, Gradients]:
        """Loss and gradients for a rank's rows, scaled such that their mean over ranks is the full gradient."""
        setup, part, (_, count) = self.setups[rank.rank], self.take(rank, batch), self._part(rank)
        for value in model.values():
            value.grad = None
        if not part.rows:
            return 0.0, {}
        is_own = self.training.loss.is_mean and self.divides_by_own_rows
        setup.loss_scale = count
        loss = microbatch_loss(setup, part, index, part.rows * count if is_own else batch.rows)
        loss.backward()  # type: ignore[no-untyped-call]
        return scalar_value(loss), {name: value.grad for name, value in model.items() if value.grad is not None}

    def _reduced(self, gradients: list[Gradients], _last: bool) -> list[Gradients]:
        for change in self.before_reducing:
            for own in gradients:
                change(own)
        return [{name: self._mean(rank, name, gradients) for name in gradients[rank.rank]} for rank in self.coordinates]

    def _mean(self, rank: RankCoordinate, name: str, gradients: list[Gradients]) -> torch.Tensor:
        reduction = self.reductions.get(name, Reduction(axes=self.data_axes))
        peers = self.peers(rank, reduction.axes)
        values = [gradients[peer][name] for peer in peers if name in gradients[peer]]
        parts = values if self.reduces_in is None else [value.to(self.reduces_in) for value in values]
        return Averaging(division=self.division, divisor=len(peers)).mean(parts).to(values[0].dtype) * reduction.factor


def take_range(batch: Batch, rows: range) -> Batch:
    """Contiguous rows from a batch."""
    inputs, targets = (values.narrow(batch.batch_dim, rows.start, len(rows)) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else mask.narrow(0, rows.start, len(rows)) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


def _loss_of_rank(losses: list[float], rank: int, _setup: Setup, _batches: Sequence[Batch], _index: int) -> float:
    """Replaces `Setup.compute`: the rank's loss is already known."""
    return losses[rank]


def _advance(running: Sequence[Generator[Pause, None, Trace]]) -> None:
    """Resume each training until its next pause."""
    for each in running:
        next(each)


def _finished(running: Generator[Pause, None, Trace]) -> Trace:
    try:
        next(running)
    except StopIteration as end:
        trace: Trace = end.value
        return trace
    raise AssertionError("a training pauses twice a step")
