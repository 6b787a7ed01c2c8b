"""Correct trainings whose ranks return a wrong loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from equivcheck.diagnosis.words import number_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.accumulate import scalar
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.user.task import Loss
from equivcheck.worlds.trace.differences import Phase

RIGHT = "your ranks train correctly, but the loss that they return is"


def wrong_losses(diverged: DivergedTraining, honest: Honest) -> Iterator[Counterfactual]:
    """Yield wrong losses (scaled, from one microbatch or from one rank) if nothing else differs."""
    if any(found.phase is not Phase.LOSS for found in diverged.divergences):
        return
    for size in diverged.counts:
        for factor in (float(size), 1 / size):
            if factor != 1.0:
                words = f"{RIGHT} {factor:g} times the loss{number_of(diverged, factor)}"
                yield Counterfactual(cause=Cause.SCALED, sentence=words, change=_times(factor))
    for index in range(honest.num_backward if honest.num_backward > 1 else 0):
        words = f"{RIGHT} from microbatch {index} only"
        yield Counterfactual(cause=Cause.MICROBATCH_LOST, sentence=words, change=_of_microbatch(index))
        words = f"{words}, divided by the number of microbatches"
        divided = _of_microbatch(index, honest.num_backward)
        yield Counterfactual(cause=Cause.MICROBATCH_LOST, sentence=words, change=divided)
    if diverged.shares and diverged.data_axes:
        for rank in range(diverged.task.num_ranks):
            words = f"{RIGHT} from rank {rank}'s rows only"
            yield Counterfactual(cause=Cause.NOT_REDUCED, sentence=words, change=_of_rank(rank), own_rows=True)


def _number(value: Any) -> float:
    return scalar(value) if isinstance(value, torch.Tensor) else float(value)


def _times(factor: float) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        ranks.returns = lambda _rank, value: None if value is None else _number(value) * factor

    return change


def _of_rank(source: int) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        ranks.returns = lambda rank, value: ranks.exchange(rank, value, lambda all_: [all_[source]] * len(all_))

    return change


def _of_microbatch(index: int, divisor: int = 1) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        seen: dict[int, list[float]] = {}

        def watching(rank: int, loss: Loss) -> Loss:
            def watched(outputs: Any, targets: Any) -> torch.Tensor:
                value = loss(outputs, targets)
                seen.setdefault(rank, []).append(scalar(value))
                return value

            return watched

        def returned(rank: int, _value: Any) -> float:
            return seen.pop(rank)[index] / divisor

        ranks.wraps_loss, ranks.returns = watching, returned

    return change
