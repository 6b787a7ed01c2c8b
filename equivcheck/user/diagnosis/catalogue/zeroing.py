"""Mistakes in zeroing gradients between several backward passes in a step."""

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
    """Yield possible mistakes: one of several `zero_grad` calls in each step has no effect. Each call is tried."""
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
