"""Microbatches that are accumulated in a wrong way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone
from equivcheck.train.accumulate import part_loss, scalar
from equivcheck.train.material import Batch
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause

Weights = Sequence[float]
"""Of each microbatch, a factor beside its share of the step's loss; 0 leaves it out."""


def wrong_accumulations(case: Case) -> Iterator[Counterfactual]:
    """Left out, summed, averaged as if equal, scaled or stepped again and again, or never zeroed."""
    if case.rounding is None and len(case.scenario.training.data.microbatches) > 1:
        yield from _weighted(case)
        yield from _rescaled(case)
        yield from _stepped(case)
    if case.first.step:
        words = "gradients are not zeroed between steps: those of earlier steps are added up"
        yield alone(case, Cause.NOT_ZEROED, words, _keep_gradients)


def _weighted(case: Case) -> Iterator[Counterfactual]:
    training = case.scenario.training
    rows, batch = training.data.microbatches, training.data.batch
    whole = [batch / each for each in rows]
    count = len(rows)
    if training.loss.is_mean:
        yield from _both(case, Cause.MICROBATCHES_SUMMED, f"the sum over the {count} microbatches, not the mean", whole)
    yield from _both(case, Cause.MICROBATCHES_SUMMED, f"multiplied by the number of microbatches, {count}", [count] * count)
    if len(set(rows)) > 1:
        words = f"the mean over the {count} microbatches as if they had equally many rows"
        yield from _both(case, Cause.MEAN_OF_MEANS, words, [each / count for each in whole])
    for index in range(count):
        only = [float(at == index) for at in range(count)]
        words = f"that of microbatch {index} alone"
        yield from _both(case, Cause.MICROBATCH_LOST, words, only)
        yield from _both(case, Cause.MICROBATCH_LOST, f"{words}, not scaled down", [one * whole[index] for one in only])
        without = [1.0 - one for one in only]
        kept = batch / (batch - rows[index])
        yield from _both(case, Cause.MICROBATCH_LOST, f"without microbatch {index}", without)
        yield from _both(case, Cause.MICROBATCH_LOST, f"the mean without microbatch {index}", [one * kept for one in without])


def _both(case: Case, cause: Cause, words: str, weights: Weights) -> Iterator[Counterfactual]:
    """Gradients and loss weighted, or gradients alone."""
    yield alone(case, cause, f"the gradient is {words}", _weighting(weights, [1.0] * len(weights)))
    yield alone(case, cause, f"gradient and loss are {words}", _weighting(weights, weights))


def _weighting(weights: Weights, of_loss: Weights) -> Callable[[Setup], None]:
    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        total = 0.0
        for batch, weight, share in zip(microbatches, weights, of_loss, strict=True):
            loss = part_loss(setup, setup.take(batch), index, batch.rows)
            if weight:
                (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += scalar(loss) * share
        return total

    def change(setup: Setup) -> None:
        setup.compute = compute

    return change


def _rescaled(case: Case) -> Iterator[Counterfactual]:
    """What has been accumulated is multiplied at each microbatch, after it has been added or before."""
    training = case.scenario.training
    rows, batch = training.data.microbatches, training.data.batch
    factor = 1 / len(rows)
    ways = [([1.0] * len(rows), "once more ")]
    if training.loss.is_mean:
        ways.insert(0, ([batch / each for each in rows], ""))
    for weights, more in ways:
        for after in (True, False):
            words = f"what is accumulated is divided by the number of microbatches {more}at each of them"
            yield alone(case, Cause.RESCALED_EACH_MICROBATCH, words, _rescaling(weights, factor, after=after))


def _rescaling(weights: Weights, factor: float, *, after: bool) -> Callable[[Setup], None]:
    def scale(setup: Setup) -> None:
        for parameter in setup.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        total = 0.0
        for batch, weight in zip(microbatches, weights, strict=True):
            if not after:
                scale(setup)
            loss = part_loss(setup, setup.take(batch), index, batch.rows)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            if after:
                scale(setup)
            total += scalar(loss)
        return total

    def change(setup: Setup) -> None:
        setup.compute = compute

    return change


def _stepped(case: Case) -> Iterator[Counterfactual]:
    words = "the optimizer steps at each microbatch, not once for all"
    for zeroing, more in ((True, ""), (False, ", on what is accumulated by then")):
        yield alone(case, Cause.STEPPED_EACH_MICROBATCH, words + more, _stepping(zeroing=zeroing, whole=False))
        yield alone(case, Cause.STEPPED_EACH_MICROBATCH, words + more, _stepping(zeroing=zeroing, whole=True))


def _stepping(*, zeroing: bool, whole: bool) -> Callable[[Setup], None]:
    """`whole` leaves the loss of a microbatch as it is, rather than scaling it to its share."""
    optimizers: list[torch.optim.Optimizer] = []

    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        total = 0.0
        for number, batch in enumerate(microbatches):
            loss = part_loss(setup, setup.take(batch), index, batch.rows)
            weight = setup.training.data.batch / batch.rows if whole and setup.training.loss.is_mean else 1.0
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += scalar(loss)
            if number < len(microbatches) - 1:
                setup.update(optimizers[-1])
                if zeroing:
                    optimizers[-1].zero_grad()
        return total

    def change(setup: Setup) -> None:
        setup.before_step.append(lambda optimizer, _step: optimizers.append(optimizer))
        setup.compute = compute

    return change


def _keep_gradients(setup: Setup) -> None:
    def keep(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        optimizer.zero_grad = lambda **_: None  # type: ignore[method-assign]

    setup.before_training.append(keep)
