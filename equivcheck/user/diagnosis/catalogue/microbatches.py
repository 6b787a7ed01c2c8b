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
from equivcheck.user.diagnosis.catalogue.reductions import keep_unreduced, reduce_by
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, Span, StepFacts
from equivcheck.user.task import Loss


def wrong_accumulations(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in accumulation: unreduced, missing, summed or repeated contributions."""
    count = facts.num_backward
    if count > 1:
        if diverged.has_own_rows:
            yield from _unreduced(diverged, count)
        yield from _left_out(count)
        yield from _uneven(diverged, count)
        factor = [float(count)] * count
        yield from _both(Cause.MICROBATCHES_SUMMED, f"the sum over the {count} microbatches, not the mean", factor)
        factor = [1 / count] * count
        yield from _both(Cause.RESCALED_EACH_MICROBATCH, "divided by the number of microbatches twice", factor)
        factor = [count ** -(count - 1.0 - number) for number in range(count)]
        words = "the accumulated gradient is divided by the number of microbatches again after each microbatch"
        yield Mistake(Cause.RESCALED_EACH_MICROBATCH, words, partial(_weigh_gradients, weights=factor))
    if len(diverged.task.batches) > 1:
        words = "gradients are not zeroed between steps: each step adds to those of earlier steps"
        yield Mistake(Cause.NOT_ZEROED, words, _keep_gradients)


def _unreduced(diverged: DivergedTraining, count: int) -> Iterator[Mistake]:
    for numbers in dict.fromkeys((tuple(range(1, count)), tuple(range(count - 1)), (count - 1,), (0,))):
        which = f"microbatch{'' if len(numbers) == 1 else 'es'} {join_words([str(number) for number in numbers])}"
        only = " (only the first is)" if numbers == tuple(range(1, count)) else ""
        words = f"the gradients of {which} are left unreduced over {diverged.ranks_text(diverged.data_axes)}{only}"
        yield Mistake(Cause.NOT_REDUCED, words, reduce_by(keep_unreduced, None, Span(first=0), numbers), own_rows=True)


def _left_out(count: int) -> Iterator[Mistake]:
    for index in range(count):
        only = [float(at == index) for at in range(count)]
        where = {0: ", the first,", count - 1: ", the last,"}.get(index, "")
        words = f"from microbatch {index}{where} only"
        yield from _both(Cause.MICROBATCH_LOST, words, [one * count for one in only])
        yield from _both(Cause.MICROBATCH_LOST, f"{words}, weighted by its share", only)
        if count > 2:
            without = [1.0 - one for one in only]
            yield from _both(Cause.MICROBATCH_LOST, f"missing microbatch {index}{where.rstrip(',')}", without)
            averaged = f"missing microbatch {index}{where} and averaged over the others"
            yield from _both(Cause.MICROBATCH_LOST, averaged, [one * count / (count - 1) for one in without])


def _uneven(diverged: DivergedTraining, count: int) -> Iterator[Mistake]:
    """Microbatches with different numbers of rows: equal weights instead of weights by rows, or vice versa."""
    rows = [len(rows_of(each)) for each in microbatches(diverged.task.batches[0])]
    if len(rows) == count and len(set(rows)) > 1 and all(rows):
        equal = [sum(rows) / (count * size) for size in rows]
        words = f"averaged over the {count} microbatches although they have different numbers of rows"
        yield from _both(Cause.MEAN_OF_MEANS, words, equal)
        words = f"averaged over the {count} microbatches by their number of rows"
        yield from _both(Cause.MEAN_OF_MEANS, words, [1 / weight for weight in equal])


def _both(cause: Cause, words: str, weights: Sequence[float]) -> Iterator[Mistake]:
    """The mistake in gradients only, and in both loss and gradients."""
    yield Mistake(cause, f"the gradient is {words}", partial(_weigh_gradients, weights=weights))
    yield Mistake(cause, f"gradient and loss are {words}", partial(_weigh_losses, weights=weights))


def _weigh_gradients(ranks: EmulatedUserRanks, *, weights: Sequence[float]) -> None:
    def reduce(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
        weight = weights[microbatch] if microbatch < len(weights) else 1.0
        return [{name: value * weight for name, value in each.items()} for each in ranks.mean(all_, microbatch, step)]

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
