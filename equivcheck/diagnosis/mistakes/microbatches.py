"""Mistakes in gradient accumulation, and gradients that are never zeroed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.evidence import Evidence, axis_combinations
from equivcheck.diagnosis.mistake import Mistake, Span, StepFacts
from equivcheck.diagnosis.mistakes.reductions import keep_unreduced, mix_gradients, reduce_by, subject, weigh_losses
from equivcheck.diagnosis.suspects import Masks, suspects
from equivcheck.diagnosis.words import gradients, join_words
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause


def wrong_accumulations(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in gradient accumulation. They are tried for the elements that differ first, and for all elements."""
    count, rows = facts.num_backward, _rows(diverged, facts)
    full = [sum(rows) / each for each in rows]
    for masks in suspects(diverged) if count > 1 else ():
        what = "the gradient is" if masks is None else subject(diverged, masks)
        if diverged.has_own_rows:
            yield from _unreduced(diverged, count, masks)
        for cause, words, weights in (*_left_out(full), *_uneven(rows), *_rescaled(full)):
            change = partial(_weigh_gradients, weights=weights, masks=masks)
            yield Mistake(cause, f"{what} {words}", change, is_quick=True)
            if masks is None:
                change = partial(weigh_losses, weights=weights)
                yield Mistake(cause, f"gradient and loss are {words}", change, is_quick=True)
        for cause, words, weights in _accumulated_again(diverged, full):
            sentence = f"{'the accumulated gradient is' if masks is None else what} {words}"
            yield Mistake(cause, sentence, partial(_weigh_gradients, weights=weights, masks=masks), is_quick=True)


def unzeroed_gradients(diverged: Evidence, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes: all gradients, or those in the first divergence, are never zeroed. This first shows in the second step."""
    tried = [None if masks is None else tuple(masks) for masks in suspects(diverged)]
    # All gradients come first: it is the usual mistake, and gives the same values if the other gradients were zero.
    for names in dict.fromkeys((None, *tried)) if diverged.first.step else ():
        what = "gradients are" if names is None else gradients(diverged, names)
        words = f"{what} not zeroed between steps: each step adds to those of earlier steps"
        yield Mistake(Cause.NOT_ZEROED, words, partial(_keep_gradients, names=names), is_quick=True)


def _rows(diverged: Evidence, facts: StepFacts) -> Sequence[int]:
    """Return each microbatch's number of rows, or ones if the numbers are not known."""
    found, count = diverged.microbatch_rows, facts.num_backward
    return found if len(found) == count and all(found) else (1,) * count


def updates_in_microbatches(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes: the optimizer steps after each microbatch, with its gradients or with all gradients accumulated so far."""
    count, rows = facts.num_backward, _rows(diverged, facts)
    words = "the optimizer steps after each microbatch, not once after all"
    full = tuple(sum(rows) / each for each in rows)
    for zeroes, more in ((True, ""), (False, ", with the gradients accumulated so far")):
        for weights in dict.fromkeys(((1.0,) * count, full, (float(count),) * count)) if count > 1 else ():
            change = partial(_step_in_microbatches, zeroes=zeroes, weights=weights)
            yield Mistake(Cause.STEPPED_EACH_MICROBATCH, words + more, change, is_quick=True)


def _step_in_microbatches(ranks: EmulatedRanks, *, zeroes: bool, weights: Sequence[float]) -> None:
    def update(rank: int, _step: int) -> None:
        for each in ranks.each_optimizer(rank):
            each.step()
            if zeroes:
                each.zero_grad()

    ranks.multiply_gradients(lambda _name, microbatch, _step: weights[microbatch])
    ranks.between_microbatches.append(update)


def _unreduced(diverged: Evidence, count: int, masks: Masks | None) -> Iterator[Mistake]:
    what = "the gradients are" if masks is None else subject(diverged, masks)
    for numbers in dict.fromkeys((tuple(range(1, count)), tuple(range(count - 1)), (count - 1,), (0,))):
        which = f"in microbatch{'' if len(numbers) == 1 else 'es'} {join_words([str(number) for number in numbers])}"
        only = ", and reduced in microbatch 0 only" if numbers == tuple(range(1, count)) else ""
        words = f"{what} left unreduced over {diverged.ranks_text(diverged.data_axes)} {which}{only}"
        yield Mistake(Cause.NOT_REDUCED, words, reduce_by(keep_unreduced, masks, Span(first=0), numbers), own_rows=True)


Weighted = tuple[Cause, str, list[float]]
"""Short name, words after "the gradient is", and a factor for each microbatch."""


def _left_out(full: Sequence[float]) -> Iterator[Weighted]:
    """Yield factors with which some microbatches are left out.

    `full` has the factor by which each microbatch's mean exceeds its share of the batch's mean.
    """
    count = len(full)
    for index, factor in enumerate(full):
        only = [float(at == index) for at in range(count)]
        where = {0: " (the first)", count - 1: " (the last)"}.get(index, "")
        words = f"from microbatch {index}{where} only"
        yield Cause.MICROBATCH_LOST, words, [one * factor for one in only]
        yield Cause.MICROBATCH_LOST, f"{words}, weighted by its share", only
        if count > 2:
            without = [1.0 - one for one in only]
            yield Cause.MICROBATCH_LOST, f"missing microbatch {index}{where}", without
            averaged = f"missing microbatch {index}{where} and averaged over the others"
            yield Cause.MICROBATCH_LOST, averaged, [one / (1 - 1 / factor) for one in without]
        words = f"accumulated with microbatch {index}{where} added twice"
        yield Cause.MICROBATCH_REPEATED, words, [1.0 + one for one in only]


def _uneven(rows: Sequence[int]) -> Iterator[Weighted]:
    """Yield equal weights instead of weights by rows, or vice versa, for microbatches with different numbers of rows."""
    if len(set(rows)) > 1:
        equal = [sum(rows) / (len(rows) * size) for size in rows]
        words = f"averaged over the {len(rows)} microbatches although they have different numbers of rows"
        yield Cause.MEAN_OF_MEANS, words, equal
        words = f"averaged over the {len(rows)} microbatches by their number of rows"
        yield Cause.MEAN_OF_MEANS, words, [1 / weight for weight in equal]


def _rescaled(full: list[float]) -> Iterator[Weighted]:
    count = len(full)
    yield Cause.MICROBATCHES_SUMMED, f"the sum over the {count} microbatches, not the mean", full
    if len(set(full)) > 1:
        yield Cause.MICROBATCHES_SUMMED, f"multiplied by the number of microbatches, {count}", [float(count)] * count
    yield Cause.RESCALED_EACH_MICROBATCH, "divided by the number of microbatches twice", [1 / count] * count


def _accumulated_again(diverged: Evidence, full: Sequence[float]) -> Iterator[Weighted]:
    """Yield factors if earlier microbatches are divided or summed again before or after each microbatch.

    Their own division may be kept or not.
    """
    count = len(full)
    for weights, more in ((full, ""), ([1.0] * count, " again")):
        for late, when in ((0, "after"), (1, "before")):
            factors = [weight * count ** (number + late - float(count)) for number, weight in enumerate(weights)]
            yield Cause.RESCALED_EACH_MICROBATCH, f"divided by the number of microbatches{more} {when} each microbatch", factors
    for axes in axis_combinations(diverged.wide_axes):
        words = f"summed over {diverged.ranks_text(axes)} again after each microbatch"
        yield Cause.RESCALED_EACH_MICROBATCH, words, [diverged.size(axes) ** (count - 1.0 - number) for number in range(count)]


def _weigh_gradients(ranks: EmulatedRanks, *, weights: Sequence[float], masks: Masks | None) -> None:
    def reduce(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
        weight = weights[microbatch] if microbatch < len(weights) else 1.0
        right = ranks.mean(all_, microbatch, step)
        return [mix_gradients({name: value * weight for name, value in each.items()}, each, masks) for each in right]

    ranks.reduce = reduce


def _keep_gradients(ranks: EmulatedRanks, *, names: tuple[str, ...] | None) -> None:
    """Bug: add gradients to those of the step before; `names` selects parameters, and None all."""
    kept: dict[int, Gradients] = {}

    def add(rank: int, _step: int) -> None:
        for name, value in kept.get(rank, {}).items():
            parameter = ranks.parameters[rank][name]
            parameter.grad = value if parameter.grad is None else parameter.grad + value

    def keep(rank: int, _step: int) -> None:
        kept[rank] = {name: value.clone() for name, value in ranks.gradients(rank).items() if names is None or name in names}

    ranks.after_backward.append(add)
    ranks.after_update.append(keep)
