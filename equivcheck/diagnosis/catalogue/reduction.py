"""Gradients scaled until clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.differences import Phase


def unscaled_after_clipping(diverged: DivergedRun, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield the first wrong gradients' constant ratio, undone before the update."""
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated)
    ratio = diverged.ratio(names, Phase.GRADIENT) if names else None
    if ratio is None:
        return
    for chosen in dict.fromkeys((names, diverged.updated)):
        words = f"{gradients(diverged, chosen)} {ratio:g} times as large as on one device, and unscaled only after clipping"
        yield Mistake(Cause.NOT_UNSCALED, words, partial(_scale_until_clipped, names=chosen, ratio=ratio), is_quick=True)


def _scale_until_clipped(ranks: EmulatedRanks, *, names: Sequence[str], ratio: float) -> None:
    def scale(rank: int, factor: float) -> None:
        for name, gradient in ranks.gradients(rank).items():
            if name in names:
                gradient.mul_(factor)

    ranks.after_backward.append(lambda rank, _step: scale(rank, ratio))
    ranks.before_update.append(lambda rank, _step: scale(rank, 1 / ratio))
