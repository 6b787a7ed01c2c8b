"""Mistakes in gradient reduction: missing, over the wrong ranks, or scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from equivcheck.diagnosis.words import count_description, gradients, rows_of_tensor
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, Masks, axis_subsets, suspects
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Change, Mistake, Span, StepFacts, mix_elements, pick, spans
from equivcheck.worlds.trace.differences import Phase

Wrong = Callable[[EmulatedUserRanks, list[Gradients]], list[Gradients]]
"""Returns each rank's gradients, from the gradients on all ranks."""
LEAST_SCALE = 16.0
"""A power of two from here on counts as a loss scaler's factor."""


def wrong_reductions(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in reduction for the first wrong gradients, and for all."""
    for span in spans(diverged):
        for masks in suspects(diverged):
            what = gradients(diverged, diverged.updated if masks is None else tuple(masks))
            if masks is not None and not all(mask.all() for mask in masks.values()):
                what = f"the gradients of {rows_of_tensor({name: mask.numpy() for name, mask in masks.items()})} are"
            if diverged.has_own_rows:
                ways = (*_over_some_axes(diverged), *_over_groups(diverged), *_from_one_rank(diverged))
                for cause, words, wrong in ways:
                    yield Mistake(cause, f"{what} {words}{span.words}", reduce_by(wrong, masks, span), own_rows=True)
            for cause, words, factor in _factors(diverged):
                change = reduce_by(partial(_scaled, factor=factor), masks, span)
                yield Mistake(cause, f"{what} {words}{span.words}", change)


def reduce_by(wrong: Wrong, masks: Masks | None, span: Span, microbatches: Sequence[int] | None = None) -> Change:
    """Return a change: reduce by `wrong` for selected elements, steps and microbatches. None selects all."""

    def change(ranks: EmulatedUserRanks) -> None:
        def reduce(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
            right = ranks.mean(all_, microbatch, step)
            if step not in span or (microbatches is not None and microbatch not in microbatches):
                return right
            return [_mixed(*each, masks) for each in zip(wrong(ranks, all_), right, strict=True)]

        ranks.reduce = reduce

    return change


def _mixed(wrong: Gradients, right: Gradients, masks: Masks | None) -> Gradients:
    found = dict[str, torch.Tensor]()
    for name, value in right.items():
        is_meant, mask = pick(masks, name)
        other = wrong[name] if name in wrong else torch.zeros_like(value)
        found[name] = mix_elements(other, value, mask) if is_meant else value
    return found


def keep_unreduced(_ranks: EmulatedUserRanks, all_: list[Gradients]) -> list[Gradients]:
    """Leave each rank's gradients unreduced."""
    return all_


def _over_some_axes(diverged: DivergedTraining) -> Iterator[tuple[Cause, str, Wrong]]:
    for lacking in axis_subsets(diverged.data_axes):
        kept = tuple(name for name in diverged.data_axes if name not in lacking)
        cause = Cause.REDUCED_OVER_PART if kept else Cause.NOT_REDUCED
        words = f"left unreduced over {diverged.ranks_text(lacking)}: each rank keeps the gradient of its own rows"
        if kept:
            words = f"reduced over {diverged.ranks_text(kept)}, but not over {diverged.ranks_text(lacking)}"
        yield cause, words, partial(_mean_along, axes=kept, divisor=1)
        divided = partial(_mean_along, axes=kept, divisor=diverged.size(lacking))
        yield cause, f"{words}, but divided by the number of ranks", divided


def _mean_along(ranks: EmulatedUserRanks, all_: list[Gradients], *, axes: Sequence[str], divisor: int) -> list[Gradients]:
    means = [ranks.mean_over(all_, ranks.peers(rank, axes)) for rank in range(len(all_))]
    return [{name: value / divisor for name, value in each.items()} for each in means]


def _over_groups(diverged: DivergedTraining) -> Iterator[tuple[Cause, str, Wrong]]:
    """Groups outside the mesh axes: adjacent ranks, or ranks at the largest equal distance."""
    count = diverged.task.num_ranks
    for size in (size for size in range(2, count) if count % size == 0):
        for words, groups in (
            (f"groups of {size} adjacent ranks", [range(at, at + size) for at in range(0, count, size)]),
            (f"groups of every {count // size}th rank", [range(at, count, count // size) for at in range(count // size)]),
        ):
            group_of = [next(group for group in groups if rank in group) for rank in range(count)]
            yield Cause.REDUCED_OVER_PART, f"reduced over {words} only", partial(_mean_within, group_of=group_of)


def _mean_within(ranks: EmulatedUserRanks, all_: list[Gradients], *, group_of: Sequence[Sequence[int]]) -> list[Gradients]:
    return [ranks.mean_over(all_, group) for group in group_of]


def _from_one_rank(diverged: DivergedTraining) -> Iterator[tuple[Cause, str, Wrong]]:
    for source in range(diverged.task.num_ranks):
        words = f"copied from rank {source} to every rank, not reduced"
        yield Cause.NOT_REDUCED, words, partial(_copied, source=source)
    for source in range(diverged.task.num_ranks):
        words = f"left unreduced on rank {source} only: it keeps the gradient of its own rows"
        yield Cause.NOT_REDUCED, words, partial(_kept_on, source=source)


def _copied(_ranks: EmulatedUserRanks, all_: list[Gradients], *, source: int) -> list[Gradients]:
    return [all_[source]] * len(all_)


def _kept_on(ranks: EmulatedUserRanks, all_: list[Gradients], *, source: int) -> list[Gradients]:
    right = ranks.mean(all_, 0, 0)
    return [all_[rank] if rank == source else right[rank] for rank in range(len(all_))]


def _factors(diverged: DivergedTraining) -> Iterator[tuple[Cause, str, float]]:
    yield Cause.GRADIENT_LOST, "zero", 0.0
    known = set[float]()
    for chosen in axis_subsets(diverged.wide_axes):
        size, where = diverged.size(chosen), diverged.ranks_text(chosen)
        known |= {float(size), 1 / size}
        rows_differ = set(chosen) <= set(diverged.data_axes)
        words = f"the sum over {where}, not the mean" if rows_differ else f"multiplied by the number of {where}"
        yield Cause.SUMMED, words, float(size)
        words = f"averaged twice over {where}" if rows_differ else f"divided by the number of {where}"
        yield Cause.AVERAGED_TWICE, words, 1 / size
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated)
    ratio = diverged.ratio(names, Phase.GRADIENT) if names else None
    if ratio is not None and ratio not in known:
        is_scaler = abs(ratio) >= LEAST_SCALE and math.log2(abs(ratio)).is_integer()
        why = ", as if the loss had been scaled and gradients never unscaled" if is_scaler else count_description(diverged, ratio)
        cause = Cause.NOT_UNSCALED if is_scaler else Cause.SCALED
        yield cause, f"{ratio:g} times as large as on one device{why}", ratio


def _scaled(ranks: EmulatedUserRanks, all_: list[Gradients], *, factor: float) -> list[Gradients]:
    return [{name: value * factor for name, value in each.items()} for each in ranks.mean(all_, 0, 0)]
