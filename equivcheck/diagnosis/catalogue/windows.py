"""Mistakes in a last step with fewer microbatches, if it is treated like a full one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from equivcheck.diagnosis.catalogue.counterfactual import gradients_of, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy
from equivcheck.training.material import Batch, material
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase


def wrong_windows(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes if the last step has fewer microbatches than the others: a divisor for a full step, or no update."""
    training = diverged.training
    if not training.has_trailing_window:
        return
    if isinstance(training.loss, CrossEntropy) and not training.loss.summed:
        words = "the loss of each step is divided by the counted labels of the first step"
        yield on_one_device(Cause.LABEL_COUNT, words, _count_once)
    if diverged.first.step < training.steps - 1:
        return
    last = training.steps - 1
    count, full = len(training.microbatches_at(last)), len(training.data.microbatches)
    where = f"of step {last}, with {count} of {full} microbatches,"
    if diverged.first.phase in (Phase.LOSS, Phase.GRADIENT):
        shares = {"rows": training.rows_at(last) / training.data.batch}
        shares["microbatches"] = count / full
        for unit, share in shares.items():
            words = f"the gradient {where} is divided as if it had the {unit} of a full accumulation window"
            yield on_one_device(Cause.TRAILING_WINDOW, words, _dividing(last, share))
    words = f"the optimizer does not use the gradients {where} as if it waited for a full accumulation window"
    yield on_one_device(Cause.TRAILING_WINDOW, words, _not_stepping(last))


def _count_once(setup: Setup) -> None:
    inner, divisor = setup.compute, material(setup.training).steps[0][0].divisor

    def compute(altered: Setup, microbatches: Sequence[Batch], index: int) -> float | None:
        return inner(altered, [replace(batch, divisor=divisor) for batch in microbatches], index)

    setup.compute = compute


def _dividing(last: int, share: float) -> Callable[[Setup], None]:
    def divide(setup: Setup, step: int) -> None:
        for gradient in gradients_of(setup).values() if step == last else ():
            gradient.mul_(share)

    return lambda setup: setup.before_update.append(lambda _optimizer, step: divide(setup, step))


def _not_stepping(last: int) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        inner, steps = setup.update, list[int]()
        setup.before_update.append(lambda _optimizer, step: steps.append(step))

        def update(optimizer: torch.optim.Optimizer) -> None:
            if steps[-1] != last:
                inner(optimizer)

        setup.update = update

    return change
