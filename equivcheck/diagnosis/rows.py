"""Ranks that compute on the wrong rows, with the wrong masks, or from another start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone, side_by_side
from equivcheck.diagnosis.rank_coordinates import RankCoordinate, coordinates_of_ranks
from equivcheck.diagnosis.side_by_side import SideBySide, cut, data_axes
from equivcheck.diagnosis.starts import moved, permuted
from equivcheck.diagnosis.words import listed, over, tensors
from equivcheck.scenario import Pipeline
from equivcheck.trace.pieces import fill
from equivcheck.train.material import Batch
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause


def wrong_rows(case: Case) -> Iterator[Counterfactual]:
    """Rows of one rank for all, all rows for all, rows left out, masks of other rows or none."""
    mesh = case.scenario.layout.mesh
    axes = tuple(name for name in data_axes(case.scenario.layout) if mesh.size(name) > 1)
    if axes:
        for name in axes if len(axes) > 1 else ():
            words = f"{over(mesh, (name,))} compute on the same rows: those of the first"
            yield _taking(case, Cause.SAME_ROWS, words, _of_first((name,)))
        words = f"{over(mesh, axes)} compute on the same rows: those of the first"
        yield _taking(case, Cause.SAME_ROWS, words, _of_first(axes))
        words = f"{over(mesh, axes)} compute on all rows each, as if these were their own part"
        yield alone(case, Cause.SAME_ROWS, words, _scaling_loss(mesh.size(*axes)))
        words = f"the loss is not multiplied by the number of {over(mesh, axes)}, over which gradients are averaged"
        yield alone(case, Cause.AVERAGED_TWICE, words, _scaling_loss(1 / mesh.size(*axes)))
        yield from _of_others(case, axes)
    yield from _left_out(case)
    yield from _chunks_left_out(case)
    yield from _masked(case)


def _taking(case: Case, cause: Cause, words: str, take: Callable[[SideBySide, RankCoordinate, Batch], Batch]) -> Counterfactual:
    def change(trainings: SideBySide) -> None:
        trainings.take = lambda seat, batch: take(trainings, seat, batch)

    return side_by_side(case, cause, words, change)


def _of_first(axes: tuple[str, ...]) -> Callable[[SideBySide, RankCoordinate, Batch], Batch]:
    def take(trainings: SideBySide, seat: RankCoordinate, batch: Batch) -> Batch:
        coordinate = {name: 0 if name in axes else index for name, index in seat.coordinate.items()}
        return trainings.take_rows(replace(seat, coordinate=coordinate), batch)

    return take


def _of_others(case: Case, axes: tuple[str, ...]) -> Iterator[Counterfactual]:
    """One rank computes on another's rows, or its gradients count as zero."""
    seats = [
        seat
        for seat in coordinates_of_ranks(case.scenario.layout.mesh)
        if not any(i for name, i in seat.coordinate.items() if name not in axes)
    ]
    for seat in reversed(seats):
        for other in reversed(seats):
            if other is not seat:
                words = f"rank {seat.rank} computes on the rows of rank {other.rank}, and nobody on its own"
                yield _taking(case, Cause.ROWS_LOST, words, _in_place_of(seat, other, axes))
        for divided in (True, False):
            words = f"the gradients of rank {seat.rank}'s rows are left out"
            more = ", and the mean is over the others" if divided else ""
            yield side_by_side(case, Cause.ROWS_LOST, words + more, _silent(seat, axes, divided=divided))
        count = len(case.scenario.training.data.microbatches)
        for number in range(count if count > 1 else 0):
            words = f"the gradients of rank {seat.rank}'s rows of microbatch {number} are left out"
            yield side_by_side(case, Cause.ROWS_LOST, words, _silent(seat, axes, divided=False, microbatch=number))


def _is_at(seat: RankCoordinate, other: RankCoordinate, axes: tuple[str, ...]) -> bool:
    """Whether two seats are alike along some axes."""
    return all(seat.coordinate[name] == other.coordinate[name] for name in axes)


def _in_place_of(
    seat: RankCoordinate, other: RankCoordinate, axes: tuple[str, ...]
) -> Callable[[SideBySide, RankCoordinate, Batch], Batch]:
    def take(trainings: SideBySide, own: RankCoordinate, batch: Batch) -> Batch:
        return trainings.take_rows(other if _is_at(own, seat, axes) else own, batch)

    return take


def _silent(
    seat: RankCoordinate, axes: tuple[str, ...], *, divided: bool, microbatch: int | None = None
) -> Callable[[SideBySide], None]:
    """Gradients of a rank count as zero, of one microbatch or of all."""

    def change(trainings: SideBySide) -> None:
        count = trainings.layout.mesh.size(*axes)
        others = count / (count - 1) if divided else 1.0

        def weight(other: RankCoordinate, number: int) -> float:
            return 0.0 if _is_at(other, seat, axes) and microbatch in (None, number) else others

        trainings.weight_of = weight

    return change


def _scaling_loss(factor: float) -> Callable[[Setup], None]:
    """A loss so much larger, with its gradients."""

    def change(setup: Setup) -> None:
        inner = setup.compute

        def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float | None:
            loss = inner(setup, microbatches, index)
            for parameter in setup.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            return None if loss is None else loss * factor

        setup.compute = compute

    return change


def _left_out(case: Case) -> Iterator[Counterfactual]:
    """The first or last row of each rank's part, with the mean over the others or as if it were zero."""
    for last in (True, False):
        place = "last" if last else "first"
        for weighs in (False, True):
            words = f"the {place} row of each rank's part of a microbatch is left out"

            def change(trainings: SideBySide, last: bool = last, weighs: bool = weighs) -> None:
                trainings.take = lambda seat, batch: _without_one(trainings.take_rows(seat, batch), last)
                trainings.weighs = weighs

            yield side_by_side(case, Cause.ROWS_LOST, words, change)


def _chunks_left_out(case: Case) -> Iterator[Counterfactual]:
    """Chunks in which a pipeline computes each microbatch."""
    count = next((each.num_chunks for each in case.scenario.layout.of(Pipeline)), 1)
    for index in range(count if count > 1 else 0):
        for weighs in (True, False):
            words = f"chunk {index} of each microbatch is left out"

            def change(trainings: SideBySide, index: int = index, weighs: bool = weighs) -> None:
                trainings.take = lambda seat, batch: _without_chunk(trainings.take_rows(seat, batch), index, count)
                trainings.weighs = weighs

            yield side_by_side(case, Cause.MICROBATCH_LOST, words, change)
    if count > 1:
        words = f"the {count} chunks of each microbatch are summed, not averaged"
        yield alone(case, Cause.MICROBATCHES_SUMMED, words, _scaling_loss(count))


def _without_chunk(batch: Batch, index: int, count: int) -> Batch:
    kept = [row for at, rows in enumerate(torch.arange(batch.rows).chunk(count)) if at != index for row in rows.tolist()]
    rows = torch.tensor(kept, dtype=torch.int64)
    inputs, targets = (values.index_select(batch.batch_dim, rows) for values in (batch.inputs, batch.targets))
    return replace(
        batch, inputs=inputs, targets=targets, masks=tuple(None if mask is None else mask[rows] for mask in batch.masks)
    )


def _without_one(batch: Batch, last: bool) -> Batch:
    return cut(batch, range(batch.rows - 1) if last else range(min(1, batch.rows), batch.rows))


def _masked(case: Case) -> Iterator[Counterfactual]:
    if not any(layer.dropout for layer in case.scenario.training.model.layers):
        return
    ways: tuple[tuple[str, Callable[[SideBySide, RankCoordinate, Batch], Batch]], ...] = (
        ("dropout is left out", lambda trainings, seat, batch: _unmasked(trainings.take_rows(seat, batch))),
        ("every rank uses the dropout masks of the first rank's rows", _masks_of_first),
    )
    for words, take in ways:
        yield _taking(case, Cause.ANOTHER_MASK, words, take)


def _unmasked(batch: Batch) -> Batch:
    return replace(batch, masks=tuple(None for _ in batch.masks))


def _masks_of_first(trainings: SideBySide, seat: RankCoordinate, batch: Batch) -> Batch:
    own, first = trainings.take_rows(seat, batch), trainings.take_rows(trainings.seats[0], batch)
    return replace(own, masks=first.masks)


def wrong_starts(case: Case) -> Iterator[Counterfactual]:
    """Ranks that begin with other parameters or buffers than the training's own."""
    differing = moved(case.scenario.training, case.starts)
    if differing:
        names = sorted({name for name, _ in differing})
        ranks = sorted({rank for _, rank in differing})
        cause, words = (
            Cause.UNEQUAL_START,
            f"{_who(ranks, len(case.starts))} from other values of {tensors(names)} than those given",
        )
        if permuted(case.scenario.training, case.starts, names):
            cause = Cause.PERMUTED
            words = f"the elements of {tensors(names)} lie in the wrong places: shards in another order, or along another dim"
        yield side_by_side(case, cause, words, lambda trainings: _start_there(case, trainings))


def _who(ranks: list[int], count: int) -> str:
    if len(ranks) == count:
        return "every rank starts"
    if len(ranks) == 1:
        return f"rank {ranks[0]} starts"
    return f"ranks {listed([str(rank) for rank in ranks])} start"


def _start_there(case: Case, trainings: SideBySide) -> None:
    for setup, start in zip(trainings.setups, case.starts, strict=True):
        held = {**dict(setup.model.named_parameters()), **dict(setup.model.named_buffers())}
        for piece, values in start.parts():
            if piece.name in held:
                fill(held[piece.name].detach().numpy(), piece, values)
    trainings.gathering.gather([{name: value.data for name, value in each.model.named_parameters()} for each in trainings.setups])
