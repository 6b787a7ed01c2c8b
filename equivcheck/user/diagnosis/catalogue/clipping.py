"""Mistakes in gradient clipping: another rule than on one device, or another point of the step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from equivcheck.diagnosis.emulation.emulated_ranks import Scale
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import count_description
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.worlds.trace.differences import Phase


def clipped_otherwise(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: gradients are clipped by value, after each microbatch, or before they are scaled."""
    if not facts.clips or diverged.first.phase is not Phase.GRADIENT:
        return
    found = diverged.found_values(diverged.first.step, Phase.GRADIENT).values()
    largest = max((float(np.abs(values).max(initial=0.0)) for values in found), default=0.0)
    words = f"gradients are clipped by value, to {largest:g}, not by their norm"
    yield Mistake(Cause.ANOTHER_NORM, words, partial(_clip_values, limit=largest), is_quick=True)
    if facts.num_backward > 1:
        words = "gradients are clipped after each microbatch, not once per step"
        yield Mistake(Cause.RESCALED_EACH_MICROBATCH, words, _clip_microbatches, is_quick=True)
    ratio = diverged.ratio(diverged.updated, Phase.GRADIENT)
    if ratio is not None:
        words = f"gradients are clipped before they are multiplied by {ratio:g}{count_description(diverged, ratio)}"
        yield Mistake(Cause.NOT_UNSCALED, words, partial(_multiply_clipped, factor=ratio, scaled=False), is_quick=True)
        words = f"gradients of a loss that is scaled by {1 / ratio:g} are clipped before they are unscaled"
        yield Mistake(Cause.NOT_UNSCALED, words, partial(_multiply_clipped, factor=ratio, scaled=True), is_quick=True)


def _clip_values(ranks: EmulatedUserRanks, *, limit: float) -> None:
    kept: dict[int, Gradients] = {}

    def keep(rank: int, _step: int) -> None:
        kept[rank] = {name: value.clone() for name, value in ranks.gradients(rank).items()}

    def clip(rank: int, _step: int) -> None:
        for name, value in kept[rank].items():
            ranks.parameters[rank][name].grad = value.clamp(-limit, limit)

    ranks.after_backward.append(keep)
    ranks.after_clipping.append(clip)


def _clip_microbatches(ranks: EmulatedUserRanks) -> None:
    """Clip the gradients accumulated so far after each backward pass."""
    fresh: list[list[Gradients]] = []
    own = ranks.clip_rank

    def reduce(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
        fresh[:] = [] if microbatch == 0 else fresh
        fresh.append(ranks.mean(all_, microbatch, step))
        return fresh[-1]

    def clip(rank: int, tensors: list[torch.Tensor], kind: float, scale: Scale) -> torch.Tensor:
        for parameter in ranks.parameters[rank].values():
            parameter.grad = None
        norm = torch.zeros((), dtype=torch.float64)
        for gradients in fresh:
            for name, value in gradients[rank].items():
                parameter = ranks.parameters[rank][name]
                parameter.grad = value.clone() if parameter.grad is None else parameter.grad + value
            norm = own(rank, tensors, kind, scale)
        return norm

    ranks.reduce = reduce
    ranks.clip_rank = clip  # type: ignore[method-assign]


def _multiply_clipped(ranks: EmulatedUserRanks, *, factor: float, scaled: bool) -> None:
    def multiply(rank: int, by: float) -> None:
        for gradient in ranks.gradients(rank).values():
            gradient.mul_(by)

    if scaled:
        ranks.after_backward.append(lambda rank, _: multiply(rank, 1 / factor))
    ranks.after_clipping.append(lambda rank, _: multiply(rank, factor))
