"""Mistakes with rows of the batch, or with dropout masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isclose

from equivcheck.diagnosis.catalogue.counterfactual import gradients_of, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks, take_range
from equivcheck.diagnosis.evidence import RankCoordinate
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase

Take = Callable[[ScenarioRanks, RankCoordinate, Batch], Batch]
"""Function to select a rank's rows from a microbatch."""


def wrong_rows(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes with rows: the same rows on several ranks, rows that are duplicated or left out.

    Also yields mistakes with dropout masks: no masks, or the first rank's masks on every rank.
    """
    mesh, axes = diverged.mesh, diverged.data_axes
    if axes:
        for chosen in (*((name,) for name in axes if len(axes) > 1), axes):
            words = f"{diverged.ranks_text(chosen)} compute on the same rows: those of the first rank"
            yield taking_rows(Cause.SAME_ROWS, words, partial(_of_first, axes=chosen))
        if _may_have_same_rows(diverged):
            words = f"each of {diverged.ranks_text(axes)} computes on all rows, not only on its own part"
            yield on_one_device(Cause.SAME_ROWS, words, partial(scaling_loss, factor=mesh.size(*axes)))
        words = f"the loss is not multiplied by the number of {diverged.ranks_kind(axes)}, but gradients are averaged over them"
        yield on_one_device(Cause.AVERAGED_TWICE, words, partial(scaling_loss, factor=1 / mesh.size(*axes)))
        yield from _of_others(diverged, axes)
    yield from _left_out()
    yield from _masked(diverged)


def _may_have_same_rows(diverged: DivergedRun) -> bool:
    """Whether all ranks with a loss have the same loss in the first wrong step, as if each computes on all rows."""
    step = diverged.first.step
    moments = (ranks for ranks in diverged.found if ranks[0].phase is Phase.LOSS and ranks[0].step == step)
    losses = [float(rank.snapshot.values[0]) for ranks in moments for rank in ranks if rank.snapshot.present[0]]
    return all(isclose(loss, losses[0], rel_tol=diverged.eps**0.5) for loss in losses)


def taking_rows(cause: Cause, words: str, take: Take, *, divides_by_own: bool = True) -> Mistake:
    """Return a mistake: ranks take other rows of each microbatch.

    Means over fewer rows are right for these rows, unless `divides_by_own` is False.
    """

    def change(ranks: ScenarioRanks) -> None:
        ranks.take = lambda rank, batch: take(ranks, rank, batch)
        ranks.divides_by_own_rows = divides_by_own

    return on_emulated_ranks(cause, words, change)


def _of_first(ranks: ScenarioRanks, rank: RankCoordinate, batch: Batch, axes: tuple[str, ...]) -> Batch:
    indices = {name: 0 if name in axes else index for name, index in rank.indices.items()}
    return ranks.take_rows(replace(rank, indices=indices), batch)


def _of_others(diverged: DivergedRun, axes: tuple[str, ...]) -> Iterator[Mistake]:
    everyone = diverged.coordinates
    ranks = [rank for rank in reversed(everyone) if rank.differs_only_along(everyone[0], axes)]
    microbatches = range(len(diverged.training.data.microbatches))
    for rank in ranks:
        for other in ranks:
            if other is not rank:
                words = f"rank {rank.rank} computes on rank {other.rank}'s rows, and its own rows are lost"
                yield taking_rows(Cause.ROWS_LOST, words, _in_place_of(rank, other, axes))
        words = f"the gradients of rank {rank.rank}'s rows are left out"
        mean = f"{words}, and the mean is over the other ranks"
        yield on_emulated_ranks(Cause.ROWS_LOST, mean, partial(_drop_gradients, rank=rank, axes=axes, divided=True))
        yield on_emulated_ranks(Cause.ROWS_LOST, words, partial(_drop_gradients, rank=rank, axes=axes, divided=False))
        for number in microbatches if len(microbatches) > 1 else ():
            words = f"the gradients of rank {rank.rank}'s rows of microbatch {number} are left out"
            change = partial(_drop_gradients, rank=rank, axes=axes, divided=False, microbatch=number)
            yield on_emulated_ranks(Cause.ROWS_LOST, words, change)


def _in_place_of(rank: RankCoordinate, other: RankCoordinate, axes: tuple[str, ...]) -> Take:
    return lambda ranks, own, batch: ranks.take_rows(other if own.agrees(rank, axes) else own, batch)


def _drop_gradients(
    ranks: ScenarioRanks, rank: RankCoordinate, axes: tuple[str, ...], *, divided: bool, microbatch: int | None = None
) -> None:
    """Zero a rank's gradients, in one microbatch or in all microbatches."""
    count = ranks.mesh.size(*axes)
    others = count / (count - 1) if divided else 1.0

    def weight(other: RankCoordinate, number: int) -> float:
        return 0.0 if other.agrees(rank, axes) and microbatch in (None, number) else others

    def reduce(all_: list[Gradients], number: int, step: int) -> list[Gradients]:
        weighted = [
            {name: value * weight(other, number) for name, value in own.items()}
            for other, own in zip(ranks.coordinates, all_, strict=True)
        ]
        return ranks.mean(weighted, number, step)

    ranks.reduce = reduce


def scaling_loss(setup: Setup, factor: float) -> None:
    """Scale the loss and its gradients."""
    inner = setup.compute

    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float | None:
        loss = inner(setup, microbatches, index)
        for gradient in gradients_of(setup).values():
            gradient.mul_(factor)
        return None if loss is None else loss * factor

    setup.compute = compute


def _left_out() -> Iterator[Mistake]:
    for place, take in (("last", _without_last), ("first", _without_first)):
        words = f"each rank leaves out the {place} of its rows of each microbatch"
        for divides_by_own in (False, True):
            yield taking_rows(Cause.ROWS_LOST, words, take, divides_by_own=divides_by_own)


def _without_last(ranks: ScenarioRanks, rank: RankCoordinate, batch: Batch) -> Batch:
    own = ranks.take_rows(rank, batch)
    return take_range(own, range(own.rows - 1))


def _without_first(ranks: ScenarioRanks, rank: RankCoordinate, batch: Batch) -> Batch:
    own = ranks.take_rows(rank, batch)
    return take_range(own, range(min(1, own.rows), own.rows))


def _masked(diverged: DivergedRun) -> Iterator[Mistake]:
    if any(layer.dropout for layer in diverged.training.model.layers):
        yield taking_rows(Cause.ANOTHER_MASK, "dropout is not applied", _unmasked)
        words = "every rank uses the dropout masks of the first rank's rows"
        yield taking_rows(Cause.ANOTHER_MASK, words, _masks_of_first)


def _unmasked(ranks: ScenarioRanks, rank: RankCoordinate, batch: Batch) -> Batch:
    return replace(ranks.take_rows(rank, batch), masks=tuple(None for _ in batch.masks))


def _masks_of_first(ranks: ScenarioRanks, rank: RankCoordinate, batch: Batch) -> Batch:
    first = ranks.take_rows(ranks.coordinates[0], batch)
    return replace(ranks.take_rows(rank, batch), masks=first.masks)
