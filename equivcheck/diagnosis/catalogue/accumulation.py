"""Faults in gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from equivcheck.diagnosis.catalogue.counterfactual import Change, Counterfactual, gradients_of, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.words import ranks_along, tensors
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Pipeline
from equivcheck.scenario.mesh import CP, PP
from equivcheck.training.accumulate import microbatch_loss, scalar_value
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

Weights = Sequence[float]
"""Factor per microbatch, in addition to its share of the step's loss; 0 leaves it out."""


def wrong_accumulations(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Microbatches lost, summed, or averaged with wrong weights; repeated scaling or stepping; gradients not zeroed."""
    if diverged.rounding is None and len(diverged.training.data.microbatches) > 1:
        yield from _weighted(diverged)
        yield from _rescaled(diverged)
        yield from _summed_again(diverged)
        yield from _stepped(diverged)
    if diverged.first.step:
        words = "gradients are not zeroed between steps: each step adds to those of earlier steps"
        yield on_one_device(diverged, Cause.NOT_ZEROED, words, _keep_gradients)


def _weighted(diverged: DivergedRun) -> Iterator[Counterfactual]:
    rows, batch = diverged.training.data.microbatches, diverged.training.data.batch
    whole, count = _whole(diverged), len(rows)
    summed, lost = Cause.MICROBATCHES_SUMMED, Cause.MICROBATCH_LOST
    if diverged.training.loss.is_mean:
        yield from _both(diverged, summed, f"the sum over the {count} microbatches, not the mean", whole)
    yield from _both(diverged, summed, f"multiplied by the number of microbatches, {count}", [count] * count)
    if len(set(rows)) > 1:
        words = f"averaged over the {count} microbatches although they have different numbers of rows"
        yield from _both(diverged, Cause.MEAN_OF_MEANS, words, [each / count for each in whole])
    for index in range(count):
        only = [float(at == index) for at in range(count)]
        words = f"from microbatch {index} only"
        yield from _both(diverged, lost, words, only)
        yield from _both(diverged, lost, f"{words}, not scaled by its share of the rows", [one * whole[index] for one in only])
        without = [1.0 - one for one in only]
        kept = batch / (batch - rows[index])
        yield from _both(diverged, lost, f"missing microbatch {index}", without)
        yield from _both(diverged, lost, f"missing microbatch {index}, averaged over the others", [one * kept for one in without])


def _whole(diverged: DivergedRun) -> list[float]:
    """Weights that remove each microbatch's share, so that each counts as a full batch."""
    data = diverged.training.data
    return [data.batch / rows for rows in data.microbatches]


def _both(diverged: DivergedRun, cause: Cause, words: str, weights: Weights) -> Iterator[Counterfactual]:
    yield on_one_device(diverged, cause, f"the gradient is {words}", _computing(weights))
    yield on_one_device(diverged, cause, f"gradient and loss are {words}", _computing(weights, of_loss=weights))


def _do_nothing(_setup: Setup) -> None:
    """No hook."""


def _computing(
    weights: Weights,
    *,
    of_loss: Weights | None = None,
    before: Callable[[Setup], None] = _do_nothing,
    after: Callable[[Setup], None] = _do_nothing,
    between: Callable[[Setup], None] = _do_nothing,
) -> Change:
    """Weight each microbatch's gradients and loss, with hooks before, after and between microbatches."""

    def compute(setup: Setup, microbatches: Sequence[Batch], index: int) -> float:
        total = 0.0
        for number, (batch, weight) in enumerate(zip(microbatches, weights, strict=True)):
            before(setup)
            loss = microbatch_loss(setup, setup.take(batch), index, batch.rows)
            if weight:
                (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += scalar_value(loss) * (1.0 if of_loss is None else of_loss[number])
            after(setup)
            if number < len(microbatches) - 1:
                between(setup)
        return total

    def change(setup: Setup) -> None:
        setup.compute = compute

    return change


def _rescaled(diverged: DivergedRun) -> Iterator[Counterfactual]:
    count = len(diverged.training.data.microbatches)
    ways: list[tuple[Weights, str]] = [([1.0] * count, "again ")]
    if diverged.training.loss.is_mean:
        ways.insert(0, (_whole(diverged), ""))

    def scale(setup: Setup) -> None:
        for gradient in gradients_of(setup).values():
            gradient.mul_(1 / count)

    words = "the accumulated gradient is divided by the number of microbatches"
    for weights, more in ways:
        for when, change in (
            ("after", _computing(weights, after=scale)),
            ("before", _computing(weights, before=scale)),
        ):
            yield on_one_device(diverged, Cause.RESCALED_EACH_MICROBATCH, f"{words} {more}{when} each of them", change)


def _summed_again(diverged: DivergedRun) -> Iterator[Counterfactual]:
    ranks, model, parts = diverged.mesh.size(PP), diverged.training.model, diverged.mesh.size(CP)
    counts = {
        weight.name: len(weight.ranks)
        for pipeline in diverged.layout.of(Pipeline)
        for weight in weights_of_several_ranks(model, pipeline, ranks)
    }
    if counts:
        yield _again(diverged, counts, f"of {tensors(list(counts))} is summed over its copies")
    if parts > 1:
        yield _again(diverged, dict.fromkeys(diverged.updated, parts), f"is summed over {ranks_along(diverged.mesh, (CP,))}")


def _again(diverged: DivergedRun, counts: dict[str, int], words: str) -> Counterfactual:
    def scale(setup: Setup) -> None:
        for name, gradient in gradients_of(setup).items():
            gradient.mul_(counts.get(name, 1))

    change = _computing([1.0] * len(diverged.training.data.microbatches), between=scale)
    sentence = f"the accumulated gradient {words} again after each microbatch"
    return on_one_device(diverged, Cause.RESCALED_EACH_MICROBATCH, sentence, change)


def _stepped(diverged: DivergedRun) -> Iterator[Counterfactual]:
    words = "the optimizer steps after each microbatch, not once after all"
    share = [1.0] * len(diverged.training.data.microbatches)
    whole = _whole(diverged) if diverged.training.loss.is_mean else share
    for zeroing, more in ((True, ""), (False, ", with the gradients accumulated so far")):
        for weights in (share, whole):
            change = _stepping(weights, zeroing=zeroing)
            yield on_one_device(diverged, Cause.STEPPED_EACH_MICROBATCH, words + more, change)


def _stepping(weights: Weights, *, zeroing: bool) -> Change:
    optimizers: list[torch.optim.Optimizer] = []

    def step(setup: Setup) -> None:
        setup.update(optimizers[-1])
        if zeroing:
            optimizers[-1].zero_grad()

    def change(setup: Setup) -> None:
        setup.before_step.append(lambda optimizer, _step: optimizers.append(optimizer))
        _computing(weights, between=step)(setup)

    return change


def _keep_gradients(setup: Setup) -> None:
    def keep(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        optimizer.zero_grad = lambda **_: None  # type: ignore[method-assign]

    setup.before_training.append(keep)
