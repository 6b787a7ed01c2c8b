"""Mistakes in gradient reduction: missing, over the wrong ranks, or scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from equivcheck.diagnosis.words import gradients, number_of, rows_of_tensor
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest, Span, mixed, pick, spans
from equivcheck.user.diagnosis.diverged import DivergedTraining, Masks, choices, suspects
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.worlds.trace.differences import Phase

Wrong = Callable[[EmulatedRanks, list[Gradients]], list[Gradients]]
"""Returns each rank's gradients, from the gradients on all ranks."""
LEAST_SCALE = 16.0
"""A power of two from here on counts as a loss scaler's factor."""


def wrong_reductions(diverged: DivergedTraining, _honest: Honest) -> Iterator[Counterfactual]:
    """Yield mistakes in reduction for the first wrong gradients, and for all."""
    for span in spans(diverged):
        for masks in suspects(diverged):
            what = _what(diverged, masks)
            if diverged.shares and diverged.data_axes:
                yield from _over_part(diverged, masks, span, what)
                yield from _over_groups(diverged, masks, span, what)
                yield from _of_one(diverged, masks, span, what)
            yield from _factors(diverged, masks, span, what)


def reducing(wrong: Wrong, masks: Masks | None, span: Span, microbatches: Sequence[int] | None = None) -> Change:
    """Return a change: reduce by `wrong` for selected elements, steps and microbatches. None selects all."""

    def change(ranks: EmulatedRanks) -> None:
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
        found[name] = mixed(other, value, mask) if is_meant else value
    return found


def own(_ranks: EmulatedRanks, all_: list[Gradients]) -> list[Gradients]:
    """Leave each rank's gradients unreduced."""
    return all_


def _what(diverged: DivergedTraining, masks: Masks | None) -> str:
    if masks is not None and not all(mask.all() for mask in masks.values()):
        return f"the gradients of {rows_of_tensor({name: mask.numpy() for name, mask in masks.items()})} are"
    return gradients(diverged, diverged.updated if masks is None else tuple(masks))


def _over_part(diverged: DivergedTraining, masks: Masks | None, span: Span, what: str) -> Iterator[Counterfactual]:
    for lacking in choices(diverged.data_axes):
        kept = tuple(name for name in diverged.data_axes if name not in lacking)
        cause = Cause.REDUCED_OVER_PART if kept else Cause.NOT_REDUCED
        words = f"reduced over {diverged.over(kept)}, but not over {diverged.over(lacking)}"
        words = words if kept else f"left unreduced over {diverged.over(lacking)}: each rank keeps the gradient of its own rows"
        for divisor, more in ((1, ""), (diverged.size(lacking), ", but divided by the number of ranks")):
            sentence = f"{what} {words}{more}{span.words}"
            yield Counterfactual(
                cause=cause, sentence=sentence, change=reducing(_along(kept, divisor), masks, span), own_rows=True
            )


def _along(axes: Sequence[str], divisor: int) -> Wrong:
    def part(ranks: EmulatedRanks, all_: list[Gradients]) -> list[Gradients]:
        means = [ranks.mean_over(all_, ranks.peers(rank, axes)) for rank in range(len(all_))]
        return [{name: value / divisor for name, value in each.items()} for each in means]

    return part


def _within(groups: Sequence[Sequence[int]]) -> Wrong:
    return lambda ranks, all_: [ranks.mean_over(all_, group) for group in groups]


def _over_groups(diverged: DivergedTraining, masks: Masks | None, span: Span, what: str) -> Iterator[Counterfactual]:
    """Groups outside the mesh axes: adjacent ranks, or ranks at the largest equal distance."""
    count = diverged.task.num_ranks
    for size in (size for size in range(2, count) if count % size == 0):
        for words, groups in (
            (f"groups of {size} adjacent ranks", [tuple(range(at, at + size)) for at in range(0, count, size)]),
            (f"groups of every {count // size}th rank", [tuple(range(at, count, count // size)) for at in range(count // size)]),
        ):
            of_rank = tuple(next(group for group in groups if rank in group) for rank in range(count))
            sentence = f"{what} reduced over {words} only{span.words}"
            yield Counterfactual(
                cause=Cause.REDUCED_OVER_PART, sentence=sentence, change=reducing(_within(of_rank), masks, span), own_rows=True
            )


def _of_one(diverged: DivergedTraining, masks: Masks | None, span: Span, what: str) -> Iterator[Counterfactual]:
    for source in range(diverged.task.num_ranks):

        def copied(_ranks: EmulatedRanks, all_: list[Gradients], source: int = source) -> list[Gradients]:
            return [all_[source]] * len(all_)

        sentence = f"{what} copied from rank {source} to every rank, not reduced{span.words}"
        yield Counterfactual(cause=Cause.NOT_REDUCED, sentence=sentence, change=reducing(copied, masks, span), own_rows=True)
    for source in range(diverged.task.num_ranks):

        def kept(ranks: EmulatedRanks, all_: list[Gradients], source: int = source) -> list[Gradients]:
            right = ranks.mean(all_, 0, 0)
            return [all_[rank] if rank == source else right[rank] for rank in range(len(all_))]

        sentence = f"{what} left unreduced on rank {source} only: it keeps the gradient of its own rows{span.words}"
        yield Counterfactual(cause=Cause.NOT_REDUCED, sentence=sentence, change=reducing(kept, masks, span), own_rows=True)


def _factors(diverged: DivergedTraining, masks: Masks | None, span: Span, what: str) -> Iterator[Counterfactual]:
    yield scaled(Cause.GRADIENT_LOST, f"{what} zero{span.words}", 0.0, masks, span)
    known = set[float]()
    for chosen in choices(diverged.wide_axes):
        size, where = diverged.size(chosen), diverged.over(chosen)
        known |= {float(size), 1 / size}
        rows_differ = set(chosen) <= set(diverged.data_axes)
        summed = f"the sum over {where}, not the mean" if rows_differ else f"multiplied by the number of {where}"
        twice = f"averaged twice over {where}" if rows_differ else f"divided by the number of {where}"
        yield scaled(Cause.SUMMED, f"{what} {summed}{span.words}", float(size), masks, span)
        yield scaled(Cause.AVERAGED_TWICE, f"{what} {twice}{span.words}", 1 / size, masks, span)
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated)
    ratio = diverged.ratio(names, Phase.GRADIENT) if names else None
    if ratio is not None and ratio not in known:
        is_scaler = abs(ratio) >= LEAST_SCALE and math.log2(abs(ratio)).is_integer()
        why = ", as if the loss had been scaled and gradients never unscaled" if is_scaler else number_of(diverged, ratio)
        cause = Cause.NOT_UNSCALED if is_scaler else Cause.SCALED
        yield scaled(cause, f"{what} {ratio:g} times as large as on one device{why}{span.words}", ratio, masks, span)


def scaled(cause: Cause, sentence: str, factor: float, masks: Masks | None, span: Span) -> Counterfactual:
    """Return a candidate: multiply reduced gradients by a factor."""

    def multiplied(ranks: EmulatedRanks, all_: list[Gradients]) -> list[Gradients]:
        return [{name: value * factor for name, value in each.items()} for each in ranks.mean(all_, 0, 0)]

    return Counterfactual(cause=cause, sentence=sentence, change=reducing(multiplied, masks, span))
