"""The trainings of all ranks on one device, one beside the other, meeting where ranks would communicate.

Each computes with whole parameters on the rows of its rank. Gradients are reduced over the ranks by plain arithmetic, and a rank
takes the elements that it does not hold from one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from equivcheck.choice import Choice
from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.gathering import Gathering, gathering_of
from equivcheck.diagnosis.rank_coordinates import RankCoordinate, coordinates_of_ranks
from equivcheck.scenario import DDP, FSDP1, FSDP2, Layout, Replicate, Replicator
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD
from equivcheck.trace.trace import Trace
from equivcheck.train.accumulate import part_loss, scalar
from equivcheck.train.loop import pausing
from equivcheck.train.material import Batch, material
from equivcheck.train.setup import Setup
from equivcheck.train.single_device import single_device

Gradients = dict[str, torch.Tensor]
"""By canonical name; a missing one is not there."""


def data_axes(layout: Layout) -> tuple[str, ...]:
    """The axes along which ranks see different rows, outermost first."""
    return tuple(name for name in layout.mesh.names if name in (DP, REPLICATE, SHARD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How a rank's gradient of a tensor comes from those of all."""

    axes: tuple[str, ...]
    """The mean is over the ranks that differ along these axes only; none for the rank's own."""
    factor: float = 1.0
    """Times this."""


class WhenReduced(Choice):
    """When gradients are reduced."""

    EACH = "each"
    """After each microbatch, what that adds."""
    WHOLE = "whole"
    """After each microbatch, all that there is by then."""
    ONCE = "once"
    """After the last one."""


def when_reduced(layout: Layout) -> WhenReduced:
    """When a layout reduces gradients."""
    for parallelism in layout.parallelisms:
        if isinstance(parallelism, (DDP, Replicate, FSDP1, FSDP2)) and parallelism.no_sync:
            return WhenReduced.ONCE
        if isinstance(parallelism, DDP) or (isinstance(parallelism, Replicate) and parallelism.implementation is Replicator.DDP):
            return WhenReduced.WHOLE
    return WhenReduced.EACH


class SideBySide:
    """Trainings that together compute what one device does, until they are changed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layout = case.scenario.layout
        self.training = case.scenario.training
        self.seats = coordinates_of_ranks(self.layout.mesh)
        self.rows_along = data_axes(self.layout)
        self.setups: list[Setup] = [single_device(self.training) for _ in self.seats]
        self.meeting = when_reduced(self.layout)
        self.take: Callable[[RankCoordinate, Batch], Batch] = self.take_rows
        self.reductions: dict[str, Reduction] = {}
        self.gathers_gradients = True
        self.weighs = True
        self.weight_of: Callable[[RankCoordinate, int], float] = lambda _seat, _number: 1.0
        self.local_microbatches: frozenset[int] = frozenset()
        self.reduces_in: torch.dtype | None = None
        self.divides_first = False
        self.before_reducing: list[Callable[[int, list[Gradients]], None]] = []
        self.after_reducing: list[Callable[[int, list[Gradients]], None]] = []

    @property
    def gathering(self) -> Gathering:
        """What each rank holds of each tensor."""
        return gathering_of(self.case)

    def take_rows(self, seat: RankCoordinate, batch: Batch) -> Batch:
        """The rows of a rank, as near to equal in number as can be."""
        place, count = self._place(seat)
        size = -(-batch.rows // count)
        start = min(place * size, batch.rows)
        return cut(batch, range(start, min(start + size, batch.rows)))

    def _place(self, seat: RankCoordinate) -> tuple[int, int]:
        place, count = 0, 1
        for name in self.rows_along:
            size = self.layout.mesh.size(name)
            place, count = place * size + seat.coordinate[name], count * size
        return place, count

    def peers(self, seat: RankCoordinate, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from one along some axes only."""
        return [
            other.rank
            for other in self.seats
            if all(other.coordinate[name] == index for name, index in seat.coordinate.items() if name not in axes)
        ]

    def train(self, num_steps: int) -> tuple[Trace, ...]:
        """Train that many steps; the trace of each rank."""
        names = [{parameter: name for name, parameter in setup.model.named_parameters()} for setup in self.setups]
        losses = [0.0] * len(self.seats)
        running = []
        for rank, setup in enumerate(self.setups):
            setup.span = range(num_steps)
            setup.compute = _giving(losses, rank)
            running.append(pausing(setup))
        models = [{name: parameter for parameter, name in each.items()} for each in names]
        steps = material(self.training).steps
        for index in range(num_steps):
            for each in running:
                next(each)
            self._compute(models, losses, steps[index], index)
            for each in running:
                next(each)
            whole = [{name: value.data for name, value in model.items()} for model in models]
            self.gathering.gather(whole)
            self.gathering.take_from_owners(whole)
        return tuple(_finish(each) for each in running)

    def _compute(
        self, models: list[dict[str, torch.nn.Parameter]], losses: list[float], batches: Sequence[Batch], index: int
    ) -> None:
        totals: list[Gradients] = [
            {name: value.grad for name, value in model.items() if value.grad is not None} for model in models
        ]
        losses[:] = [0.0] * len(losses)
        for number, batch in enumerate(batches):
            fresh = [self._backward(seat, models[seat.rank], losses, batch, index) for seat in self.seats]
            fresh = [_times(each, self.weight_of(seat, number)) for seat, each in zip(self.seats, fresh, strict=True)]
            if number in self.local_microbatches:
                totals = _added(totals, fresh)
            else:
                totals = self._accumulated(totals, fresh, index, number == len(batches) - 1)
        for hook in self.after_reducing:
            hook(index, totals)
        if self.gathers_gradients:
            self.gathering.gather(totals)
        for model, total in zip(models, totals, strict=True):
            for name, value in model.items():
                value.grad = total.get(name)

    def _backward(
        self, seat: RankCoordinate, model: dict[str, torch.nn.Parameter], losses: list[float], batch: Batch, index: int
    ) -> Gradients:
        """Gradients of a rank's rows of a microbatch, scaled so that the mean over ranks is that of all."""
        setup = self.setups[seat.rank]
        for value in model.values():
            value.grad = None
        part = self.take(seat, batch)
        if not part.rows:
            return {}
        count = self._place(seat)[1]
        rows = batch.rows
        if self.training.loss.is_mean and self.weighs:
            rows = part.rows * count
        setup.loss_scale = count
        loss = part_loss(setup, part, index, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        losses[seat.rank] += scalar(loss)
        return {name: value.grad for name, value in model.items() if value.grad is not None}

    def _accumulated(self, totals: list[Gradients], fresh: list[Gradients], index: int, last: bool) -> list[Gradients]:
        if self.meeting is WhenReduced.EACH:
            return _added(totals, self._reduced(fresh, index))
        totals = _added(totals, fresh)
        return self._reduced(totals, index) if last or self.meeting is WhenReduced.WHOLE else totals

    def _reduced(self, gradients: list[Gradients], index: int) -> list[Gradients]:
        for hook in self.before_reducing:
            hook(index, gradients)
        return [
            {name: value for name in gradients[seat.rank] for value in (self._mean(seat, name, gradients),) if value is not None}
            for seat in self.seats
        ]

    def _mean(self, seat: RankCoordinate, name: str, gradients: list[Gradients]) -> torch.Tensor | None:
        reduction = self.reductions.get(name, Reduction(axes=self.rows_along))
        peers = self.peers(seat, reduction.axes)
        values = [gradients[rank][name] for rank in peers if name in gradients[rank]]
        return self._sum(values, reduction.factor / len(peers))

    def _sum(self, values: list[torch.Tensor], factor: float) -> torch.Tensor:
        own = values[0].dtype
        summands = [self._lowered(value * factor if self.divides_first else value) for value in values]
        total = summands[0].clone()
        for value in summands[1:]:
            total += value
        return (total if self.divides_first else total * factor).to(own)

    def _lowered(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.reduces_in is None else value.to(self.reduces_in)


def _giving(losses: list[float], rank: int) -> Callable[[Setup, Sequence[Batch], int], float | None]:
    return lambda _setup, _batches, _index: losses[rank]


def cut(batch: Batch, rows: range) -> Batch:
    """Some rows of a batch, in a row."""
    inputs, targets = (values.narrow(batch.batch_dim, rows.start, len(rows)) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else mask.narrow(0, rows.start, len(rows)) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


def _times(gradients: Gradients, factor: float) -> Gradients:
    return gradients if factor == 1.0 else {name: value * factor for name, value in gradients.items()}


def _added(totals: list[Gradients], fresh: list[Gradients]) -> list[Gradients]:
    found = []
    for old, new in zip(totals, fresh, strict=True):
        found.append(old | {name: old[name] + value if name in old else value for name, value in new.items()})
    return found


def _finish(running: object) -> Trace:
    try:
        next(running)  # type: ignore[call-overload]
    except StopIteration as end:
        trace: Trace = end.value
        return trace
    raise AssertionError("a training pauses twice a step")
