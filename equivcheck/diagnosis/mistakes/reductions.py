"""Mistakes in gradient reduction: missing, over the wrong ranks, or scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import Evidence, axis_combinations
from equivcheck.diagnosis.mistake import Change, Mistake, Span, StepFacts, spans
from equivcheck.diagnosis.suspects import Masks, suspects
from equivcheck.diagnosis.words import count_description, gradients, name_ranks, rows_of_tensor
from equivcheck.layouts.base.rounding import WHOLE
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.differences import Difference, Phase

Wrong = Callable[[EmulatedRanks, list[Gradients]], list[Gradients]]
"""Function to get each rank's gradients, from the gradients on all ranks."""
Factor = tuple[Cause, str, float]
"""A cause, words about the gradients, and their factor."""
LEAST_SCALE = 16.0
"""Smallest power of two that counts as a loss scaler's factor."""


def wrong_reductions(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in the gradient reduction over ranks with different rows.

    Each is tried for the elements that differ first, and for all elements.
    """
    for span, masks in product(spans(diverged), suspects(diverged)):
        what = subject(diverged, masks)
        ways = (*_over_some_axes(diverged), *_over_groups(diverged)) if diverged.has_own_rows else ()
        rare_ways = (*_largest_of_ranks(diverged), *_from_one_rank(diverged)) if diverged.has_own_rows else ()
        places = (*_on_places(diverged),) if rare_ways and masks is None else ()
        for cause, words, wrong in (*ways, *places):
            yield Mistake(cause, f"{what} {words}{span.words}", reduce_by(wrong, masks, span), own_rows=True)
        lost = (Cause.GRADIENT_LOST, "zero", 0.0)
        yield from _multiplied(diverged, masks, span, [lost, *_numbers_of_ranks(diverged, facts, same_rows=False)], facts)
        # Last, because these fit sums and lost gradients as well if all gradients are zero on the other ranks.
        for cause, words, wrong in rare_ways:
            yield Mistake(cause, f"{what} {words}{span.words}", reduce_by(wrong, masks, span), own_rows=True)


def wrong_factors(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes: gradients are multiplied or divided by the size of an axis whose ranks have the same rows."""
    for span, masks in product(spans(diverged), suspects(diverged)):
        yield from _multiplied(diverged, masks, span, _numbers_of_ranks(diverged, facts, same_rows=True), facts)


def constant_ratios(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield a mistake: gradients are multiplied by one factor, the ratio of the first wrong gradients to the right ones.

    If the loss differs first, also yield the mistake that the loss is multiplied by a factor.
    """
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated)
    ratio = diverged.ratio(names, Phase.GRADIENT) if names else None
    if ratio is not None:
        is_scaler = abs(ratio) >= LEAST_SCALE and math.log2(abs(ratio)).is_integer()
        why = ", as if the loss had been scaled and gradients never unscaled" if is_scaler else count_description(diverged, ratio)
        factor = (Cause.NOT_UNSCALED if is_scaler else Cause.SCALED, f"{ratio:g} times as large as on one device{why}", ratio)
        for span, masks in product(spans(diverged), suspects(diverged)):
            yield from _multiplied(diverged, masks, span, [factor], facts)
    if diverged.first.phase is Phase.LOSS:
        yield from _scaled_losses(diverged)


def _multiplied(
    diverged: Evidence, masks: Masks | None, span: Span, factors: Iterable[Factor], facts: StepFacts
) -> Iterator[Mistake]:
    for cause, words, factor in factors:
        change, sentence = reduce_by(partial(_scaled, factor=factor), masks, span), f"{subject(diverged, masks)} {words}"
        yield Mistake(cause, sentence + span.words, change, is_quick=True)
        if facts.num_backward > 1 and factor:
            again = partial(_reduce_again, change=change)
            yield Mistake(cause, f"{sentence}, at each microbatch{span.words}", again, is_quick=True)


def subject(diverged: Evidence, masks: Masks | None) -> str:
    """Return subject and verb for a sentence about the gradients of some elements, such as ``all gradients are``.

    `masks` selects the elements. None stands for all elements.
    """
    if masks is None or all(mask.all() for mask in masks.values()):
        return gradients(diverged, diverged.updated if masks is None else tuple(masks))
    return f"the gradients of {rows_of_tensor({name: mask.numpy() for name, mask in masks.items()})} are"


def wrong_gradient_shards(diverged: Evidence, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes: a rank has another rank's gradient shards, or shards of different elements are averaged or summed."""
    held = held_elements(diverged)
    for distance, sources in held.sources_by_distance() if held.is_sharded else ():
        change = partial(_exchange_shards, sources=sources)
        yield Mistake(Cause.PERMUTED, f"rank r has the gradient shards of rank r + {distance}", change, is_quick=True)
    wrong = [name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated]
    for axes in axis_combinations(diverged.wide_axes) if held.is_sharded else ():
        if any(held.are_other_elements(name, axes) for name in wrong):
            for way, divisor in (("averaged", diverged.size(axes)), ("summed", 1)):
                words = f"{way} over {diverged.ranks_text(axes)}, although each rank holds another shard"
                change = partial(_reduce_shards, names=wrong, axes=axes, divisor=divisor)
                yield Mistake(Cause.REDUCED_OVER_OTHERS, f"{gradients(diverged, wrong)} {words}", change, is_quick=True)


def _exchange_shards(ranks: EmulatedRanks, *, sources: Sequence[int]) -> None:
    def exchange(rank: int, _step: int) -> None:
        for name, value in ranks.gradients(rank).items():
            ranks.held.exchange(name, value, sources)

    ranks.after_backward.append(exchange)


def _reduce_shards(ranks: EmulatedRanks, *, names: Sequence[str], axes: Sequence[str], divisor: int) -> None:
    def reduce(rank: int, _step: int) -> None:
        for name, value in ranks.gradients(rank).items():
            if name in names:
                ranks.held.add_up_shards(name, value, axes, divisor)

    ranks.after_backward.append(reduce)


def _reduce_again(ranks: EmulatedRanks, *, change: Change) -> None:
    """Bug: reduce accumulated gradients after each microbatch, so that earlier microbatches are reduced again."""
    ranks.when = WHOLE
    change(ranks)


def reduce_by(wrong: Wrong, masks: Masks | None, span: Span, microbatches: Sequence[int] | None = None) -> Change:
    """Return a change to emulated ranks: `wrong` replaces the gradient reduction for some elements, steps and microbatches.

    `masks` selects elements and `microbatches` selects microbatches; None selects all. `span` selects steps.
    """

    def change(ranks: EmulatedRanks) -> None:
        def reduce(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
            right = ranks.mean(all_, microbatch, step)
            if step not in span or (microbatches is not None and microbatch not in microbatches):
                return right
            return [mix_gradients(*each, masks) for each in zip(wrong(ranks, all_), right, strict=True)]

        ranks.reduce = reduce

    return change


def mix_gradients(wrong: Gradients, right: Gradients, masks: Masks | None) -> Gradients:
    """Return gradients that have the elements of `wrong` selected by `masks`, and else the elements of `right`.

    If `masks` is None, all elements are wrong.
    """
    chosen = {name: wrong[name] if name in wrong else torch.zeros_like(value) for name, value in right.items()}
    if masks is None:
        return chosen
    return {name: torch.where(masks[name], chosen[name], value) if name in masks else value for name, value in right.items()}


def keep_unreduced(_ranks: EmulatedRanks, all_: list[Gradients]) -> list[Gradients]:
    """Mistake: return each rank's gradients without any reduction."""
    return all_


def _over_some_axes(diverged: Evidence) -> Iterator[tuple[Cause, str, Wrong]]:
    for lacking in axis_combinations(diverged.data_axes):
        kept = tuple(name for name in diverged.data_axes if name not in lacking)
        cause = Cause.REDUCED_OVER_PART if kept else Cause.NOT_REDUCED
        words = f"left unreduced over {diverged.ranks_text(lacking)}: each rank keeps the gradient of its own rows"
        if kept:
            words = f"reduced over {diverged.ranks_text(kept)}, but not over {diverged.ranks_text(lacking)}"
        yield cause, words, partial(mean_along, axes=kept, divisor=1)
        divided = partial(mean_along, axes=kept, divisor=diverged.size(lacking))
        yield cause, f"{words}, but divided by the number of ranks", divided


def _largest_of_ranks(diverged: Evidence) -> Iterator[tuple[Cause, str, Wrong]]:
    for axes in axis_combinations(diverged.data_axes):
        yield Cause.SUMMED, f"the maximum over {diverged.ranks_text(axes)}, not the mean", partial(_largest_along, axes=axes)


def mean_along(ranks: EmulatedRanks, all_: list[Gradients], *, axes: Sequence[str], divisor: int) -> list[Gradients]:
    """Average gradients over the ranks along these axes, then also divide by `divisor`."""
    means = [ranks.mean_over(all_, ranks.peers(rank, axes)) for rank in range(len(all_))]
    return [{name: value / divisor for name, value in each.items()} for each in means]


def _largest_along(ranks: EmulatedRanks, all_: list[Gradients], *, axes: Sequence[str]) -> list[Gradients]:
    peers = [ranks.peers(rank, axes) for rank in range(len(all_))]
    return [
        {name: torch.stack([all_[peer][name] for peer in of_rank if name in all_[peer]]).amax(0) for name in all_[of_rank[0]]}
        for of_rank in peers
    ]


def _over_groups(diverged: Evidence) -> Iterator[tuple[Cause, str, Wrong]]:
    """Yield groups outside the mesh axes: adjacent ranks, or ranks at the largest equal distance."""
    count = diverged.num_ranks
    for size in (size for size in range(2, count) if count % size == 0):
        for groups in (
            [range(at, at + size) for at in range(0, count, size)],
            [range(at, count, count // size) for at in range(count // size)],
        ):
            named = [name_ranks(group) for group in groups[:2]] + ["and so on"] * (len(groups) > 2)
            words = f"groups of {size} ranks only: {', '.join(named)}"
            group_of = [next(group for group in groups if rank in group) for rank in range(count)]
            yield Cause.REDUCED_OVER_PART, f"reduced over {words}", partial(_mean_within, group_of=group_of)


def _mean_within(ranks: EmulatedRanks, all_: list[Gradients], *, group_of: Sequence[Sequence[int]]) -> list[Gradients]:
    return [ranks.mean_over(all_, group) for group in group_of]


def _from_one_rank(diverged: Evidence) -> Iterator[tuple[Cause, str, Wrong]]:
    for source in range(diverged.num_ranks):
        words = f"copied from rank {source} to every rank, not reduced"
        yield Cause.NOT_REDUCED, words, partial(_copied, source=source)
    for source in range(diverged.num_ranks):
        words = f"left unreduced on rank {source} only: it keeps the gradient of its own rows"
        yield Cause.NOT_REDUCED, words, partial(_kept_on, sources=[source])


def _copied(_ranks: EmulatedRanks, all_: list[Gradients], *, source: int) -> list[Gradients]:
    return [all_[source]] * len(all_)


def _kept_on(ranks: EmulatedRanks, all_: list[Gradients], *, sources: Sequence[int]) -> list[Gradients]:
    right = ranks.mean(all_, 0, 0)
    return [all_[rank] if rank in sources else right[rank] for rank in range(len(all_))]


def _on_places(diverged: Evidence) -> Iterator[tuple[Cause, str, Wrong]]:
    """Yield reductions missing on ranks at some places along an axis whose ranks have the same rows, such as one stage.

    Yields none if ranks agree on all values, because each would keep the gradient of its own rows.
    """
    if all(found.difference is not Difference.RANKS_DISAGREE for found in diverged.divergences):
        return
    for axis in diverged.same_row_axes:
        size = diverged.size((axis,))
        for places in dict.fromkeys(chosen for at in range(size) for chosen in ((at,), tuple({*range(size)} - {at}))):
            ranks = [each.rank for each in diverged.coordinates if each.indices[axis] in places]
            words = f"left unreduced over {diverged.ranks_text(diverged.data_axes)} on {name_ranks(ranks)} only"
            yield Cause.NOT_REDUCED, f"{words}: they keep the gradients of their own rows", partial(_kept_on, sources=ranks)


def _numbers_of_ranks(diverged: Evidence, facts: StepFacts, *, same_rows: bool) -> Iterator[Factor]:
    """Yield the numbers of ranks with different rows, or with the same rows.

    If several numbers are equal, the words name them all.
    """
    subsets = sorted(axis_combinations(diverged.wide_axes), key=len)
    for size in dict.fromkeys(diverged.size(axes) for axes in subsets):
        of_size = [axes for axes in subsets if diverged.size(axes) == size]
        data = [diverged.ranks_text(axes) for axes in of_size if set(axes) <= set(diverged.data_axes)]
        other = [diverged.ranks_kind(axes) for axes in of_size if not set(axes) <= set(diverged.data_axes)]
        if bool(data) is same_rows:
            continue
        counted = " or of ".join(
            [*other, *(words for number, words in diverged.call_counts(facts.num_backward) if number == size)]
        )
        over = " or over ".join(data)
        times = f"{size}, the number of {counted}"
        sums = [f"the sum over {over}, not the mean"] * bool(data) + [f"multiplied by {times}"] * bool(counted)
        yield Cause.SUMMED, ", or ".join(sums), float(size)
        means = [f"averaged twice over {over}"] * bool(data) + [f"divided by {times}"] * bool(counted)
        yield Cause.AVERAGED_TWICE, ", or ".join(means), 1 / size


def _scaled_losses(diverged: Evidence) -> Iterator[Mistake]:
    """Yield factors for the loss and all gradients: each known number, then the measured ratio."""
    ratio = diverged.ratio(diverged.updated, Phase.GRADIENT)
    known = [factor for size in diverged.counts for factor in (float(size), 1 / size)]
    for factor in dict.fromkeys((*known, *([] if ratio is None else [ratio]))):
        words = f"the loss and all gradients are {factor:g} times as large as on one device{count_description(diverged, factor)}"
        yield Mistake(Cause.SCALED, words, partial(weigh_losses, weights=(factor,)), is_quick=True)


def weigh_losses(ranks: EmulatedRanks, *, weights: Sequence[float]) -> None:
    """Bug: multiply each microbatch's loss by its entry in `weights`."""
    ranks.loss_weights = weights


def _scaled(ranks: EmulatedRanks, all_: list[Gradients], *, factor: float) -> list[Gradients]:
    return [{name: value * factor for name, value in each.items()} for each in ranks.mean(all_, 0, 0)]
