"""Correct trainings whose ranks return a wrong loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from equivcheck.diagnosis.words import number_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.accumulate import scalar
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts
from equivcheck.user.task import Loss
from equivcheck.worlds.trace.differences import Phase

RIGHT = "your ranks train correctly, but the loss that they return is"


def wrong_losses(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield wrong losses (scaled, from one microbatch or from one rank) if nothing else differs."""
    if any(found.phase is not Phase.LOSS for found in diverged.divergences):
        return
    for factor in (factor for size in diverged.counts for factor in (float(size), 1 / size) if factor != 1.0):
        words = f"{RIGHT} {factor:g} times the loss{number_of(diverged, factor)}"
        yield Mistake(Cause.SCALED, words, partial(_multiply, factor=factor))
    for index in range(facts.num_backward if facts.num_backward > 1 else 0):
        words = f"{RIGHT} from microbatch {index} only"
        yield Mistake(Cause.MICROBATCH_LOST, words, partial(_of_microbatch, index=index, divisor=1))
        divided = partial(_of_microbatch, index=index, divisor=facts.num_backward)
        yield Mistake(Cause.MICROBATCH_LOST, f"{words}, divided by the number of microbatches", divided)
    for rank in range(diverged.task.num_ranks) if diverged.has_own_rows else ():
        words = f"{RIGHT} from rank {rank}'s rows only"
        yield Mistake(Cause.NOT_REDUCED, words, partial(_of_rank, source=rank), own_rows=True)


def _multiply(ranks: EmulatedUserRanks, *, factor: float) -> None:
    def returned(_rank: int, value: Any) -> float | None:
        number = scalar(value) if isinstance(value, torch.Tensor) else value
        return None if number is None else float(number) * factor

    ranks.returns = returned


def _of_rank(ranks: EmulatedUserRanks, *, source: int) -> None:
    ranks.returns = lambda rank, value: ranks.exchange(rank, value, lambda all_: [all_[source]] * len(all_))


def _of_microbatch(ranks: EmulatedUserRanks, *, index: int, divisor: int) -> None:
    seen: dict[int, list[float]] = {}

    def watching(rank: int, loss: Loss) -> Loss:
        def watched(outputs: Any, targets: Any) -> torch.Tensor:
            value = loss(outputs, targets)
            seen.setdefault(rank, []).append(scalar(value))
            return value

        return watched

    ranks.wraps_loss = watching
    ranks.returns = lambda rank, _value: seen.pop(rank)[index] / divisor
