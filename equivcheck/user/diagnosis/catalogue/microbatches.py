"""Mistakes in gradient accumulation, and gradients that are never zeroed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.batches import microbatches
from equivcheck.user.diagnosis.catalogue.data import rows_of
from equivcheck.user.diagnosis.catalogue.reductions import keep_unreduced, mix_gradients, reduce_by, subject
from equivcheck.user.diagnosis.diverged import DivergedTraining, Masks, axis_subsets, suspects
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, Span, StepFacts
from equivcheck.user.task import Loss


def wrong_accumulations(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in accumulation for the first wrong gradients, and for all; then gradients that are never zeroed."""
    count = facts.num_backward
    for masks in suspects(diverged) if count > 1 else ():
        what = "the gradient is" if masks is None else subject(diverged, masks)
        if diverged.has_own_rows:
            yield from _unreduced(diverged, count, masks)
        for cause, words, weights in (*_left_out(count), *_uneven(diverged, count), *_rescaled(count)):
            yield Mistake(cause, f"{what} {words}", partial(_weigh_gradients, weights=weights, masks=masks))
            if masks is None:
                yield Mistake(cause, f"gradient and loss are {words}", partial(_weigh_losses, weights=weights))
        for cause, words, weights in _accumulated_again(diverged, count):
            yield Mistake(
                cause,
                f"{'the accumulated gradient is' if masks is None else what} {words}",
                partial(_weigh_gradients, weights=weights, masks=masks),
            )
    if len(diverged.task.batches) > 1:
        words = "gradients are not zeroed between steps: each step adds to those of earlier steps"
        yield Mistake(Cause.NOT_ZEROED, words, _keep_gradients)


def _unreduced(diverged: DivergedTraining, count: int, masks: Masks | None) -> Iterator[Mistake]:
    whose = "the gradients" if masks is None else subject(diverged, masks).removesuffix(" is").removesuffix(" are")
    for numbers in dict.fromkeys((tuple(range(1, count)), tuple(range(count - 1)), (count - 1,), (0,))):
        which = f"microbatch{'' if len(numbers) == 1 else 'es'} {join_words([str(number) for number in numbers])}"
        only = " (only the first is)" if numbers == tuple(range(1, count)) else ""
        words = f"{whose} of {which} are left unreduced over {diverged.ranks_text(diverged.data_axes)}{only}"
        yield Mistake(Cause.NOT_REDUCED, words, reduce_by(keep_unreduced, masks, Span(first=0), numbers), own_rows=True)


Weighted = tuple[Cause, str, list[float]]
"""Short name, words after "the gradient is", and a factor for each microbatch."""


def _left_out(count: int) -> Iterator[Weighted]:
    for index in range(count):
        only = [float(at == index) for at in range(count)]
        where = {0: ", the first,", count - 1: ", the last,"}.get(index, "")
        words = f"from microbatch {index}{where} only"
        yield Cause.MICROBATCH_LOST, words, [one * count for one in only]
        yield Cause.MICROBATCH_LOST, f"{words}, weighted by its share", only
        if count > 2:
            without = [1.0 - one for one in only]
            yield Cause.MICROBATCH_LOST, f"missing microbatch {index}{where.rstrip(',')}", without
            averaged = f"missing microbatch {index}{where} and averaged over the others"
            yield Cause.MICROBATCH_LOST, averaged, [one * count / (count - 1) for one in without]
        words = f"accumulated with microbatch {index}{where} added twice"
        yield Cause.MICROBATCH_REPEATED, words, [1.0 + one for one in only]


def _uneven(diverged: DivergedTraining, count: int) -> Iterator[Weighted]:
    """Microbatches with different numbers of rows: equal weights instead of weights by rows, or vice versa."""
    rows = [len(rows_of(each)) for each in microbatches(diverged.task.batches[0])]
    if len(rows) == count and len(set(rows)) > 1 and all(rows):
        equal = [sum(rows) / (count * size) for size in rows]
        words = f"averaged over the {count} microbatches although they have different numbers of rows"
        yield Cause.MEAN_OF_MEANS, words, equal
        words = f"averaged over the {count} microbatches by their number of rows"
        yield Cause.MEAN_OF_MEANS, words, [1 / weight for weight in equal]


def _rescaled(count: int) -> Iterator[Weighted]:
    yield Cause.MICROBATCHES_SUMMED, f"the sum over the {count} microbatches, not the mean", [float(count)] * count
    yield Cause.RESCALED_EACH_MICROBATCH, "divided by the number of microbatches twice", [1 / count] * count


def _accumulated_again(diverged: DivergedTraining, count: int) -> Iterator[Weighted]:
    """Earlier microbatches are divided or reduced again after each microbatch."""
    words = "divided by the number of microbatches again after each microbatch"
    yield Cause.RESCALED_EACH_MICROBATCH, words, [count ** -(count - 1.0 - number) for number in range(count)]
    for axes in axis_subsets(diverged.wide_axes):
        words = f"summed over {diverged.ranks_text(axes)} again after each microbatch"
        yield Cause.RESCALED_EACH_MICROBATCH, words, [diverged.size(axes) ** (count - 1.0 - number) for number in range(count)]


def _weigh_gradients(ranks: EmulatedUserRanks, *, weights: Sequence[float], masks: Masks | None) -> None:
    def reduce(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
        weight = weights[microbatch] if microbatch < len(weights) else 1.0
        right = ranks.mean(all_, microbatch, step)
        return [mix_gradients({name: value * weight for name, value in each.items()}, each, masks) for each in right]

    ranks.reduce = reduce


def _weigh_losses(ranks: EmulatedUserRanks, *, weights: Sequence[float]) -> None:
    def weighing(_rank: int, loss: Loss) -> Loss:
        calls = [0]

        def weighted_loss(outputs: object, targets: object) -> torch.Tensor:
            calls[0] += 1
            return loss(outputs, targets) * weights[(calls[0] - 1) % len(weights)]

        return weighted_loss

    ranks.wraps_loss = weighing


def _keep_gradients(ranks: EmulatedUserRanks) -> None:
    kept: dict[int, Gradients] = {}

    def add(rank: int, _step: int) -> None:
        for name, value in kept.get(rank, {}).items():
            parameter = ranks.parameters[rank][name]
            parameter.grad = value if parameter.grad is None else parameter.grad + value

    def keep(rank: int, _step: int) -> None:
        kept[rank] = {name: value.clone() for name, value in ranks.gradients(rank).items()}

    ranks.after_backward.append(add)
    ranks.after_update.append(keep)
