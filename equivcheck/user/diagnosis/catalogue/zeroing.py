"""Gradients that are not zeroed between backward passes, and updates between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.traces.optimizers import optimizers_in

ORDINALS = ("first", "second", "third", "fourth")
"""Names for calls, in order."""


def skipped_zeroing(_diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield steps with several backward passes, in which one `zero_grad` has no effect, as with several optimizers."""
    for number, name in enumerate(ORDINALS if facts.num_backward > 1 else ()):
        words = f"gradients are not zeroed at the {name} `zero_grad` of each step: the next backward pass adds to older gradients"
        yield Mistake(Cause.NOT_ZEROED, words, partial(_skip_zeroing, number=number), is_quick=True)


def _skip_zeroing(ranks: EmulatedUserRanks, *, number: int) -> None:
    """In each step, ignore one `zero_grad` call on the model or an optimizer."""
    counts = [0] * len(ranks.models)

    def begin(rank: int, _step: int) -> None:
        counts[rank] = 0

    def skip(rank: int, owner: Any) -> None:
        own = owner.zero_grad

        def zero_grad(*arguments: Any, **keywords: Any) -> None:
            counts[rank] += 1
            if counts[rank] - 1 != number:
                own(*arguments, **keywords)

        owner.zero_grad = zero_grad

    def skip_in_optimizers(rank: int, optimizer: Any) -> None:
        for each in optimizers_in(optimizer):
            skip(rank, each)

    ranks.before_step.append(begin)
    ranks.built.append(skip_in_optimizers)
    for rank, model in enumerate(ranks.models):
        skip(rank, model)


def updates_in_microbatches(_diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield optimizers that step after each microbatch, with its gradients or those accumulated so far."""
    words = "the optimizer steps after each microbatch, not once after all"
    for zeroes, more in ((True, ""), (False, ", with the gradients accumulated so far")):
        for weight in (1.0, float(facts.num_backward)) if facts.num_backward > 1 else ():
            change = partial(_step_in_microbatches, zeroes=zeroes, weight=weight)
            yield Mistake(Cause.STEPPED_EACH_MICROBATCH, words + more, change, is_quick=True)


def _step_in_microbatches(ranks: EmulatedUserRanks, *, zeroes: bool, weight: float) -> None:
    ranks.require = None  # the gradients of all but the last update of a step are in no trace
    ranks.multiply_gradients(lambda *_: weight)

    def update(rank: int, _step: int) -> None:
        for each in optimizers_in(ranks.optimizers[rank]):
            each.step()
            if zeroes:
                each.zero_grad()

    ranks.between_microbatches.append(update)
