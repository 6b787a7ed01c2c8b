"""Gradients with a wrong reduction or a constant factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations

import torch

from equivcheck.diagnosis.catalogue.counterfactual import (
    Change,
    Counterfactual,
    around_update,
    gradients_of,
    multiplying_gradients,
    on_emulated_ranks,
    on_one_device,
)
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.coordinates import axis_combinations
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, Reduction
from equivcheck.diagnosis.words import count_description, gradients, join_words, ranks_along
from equivcheck.layouts.base.rounding import EACH
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase

LEAST_SCALE = 16.0
"""A power of two from here on is reported as a loss scaler's factor."""


def wrong_reductions(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Reductions missing, partial, summed or averaged twice, for the tensors that differ first and for all."""
    for names in diverged.suspects:
        words = f"{gradients(diverged, names)} zero"
        yield on_one_device(diverged, Cause.GRADIENT_LOST, words, multiplying_gradients(0.0, names))
        yield from _over_part(diverged, names)
        yield from _scaled(diverged, names)
    yield from _not_of_all_microbatches(diverged)


def _over_part(diverged: DivergedRun, names: Sequence[str]) -> Iterator[Counterfactual]:
    mesh, axes = diverged.mesh, diverged.data_axes
    for count in range(len(axes) if diverged.can_be_emulated else 0):
        for kept in combinations(axes, count):
            lacking = tuple(name for name in axes if name not in kept)
            cause, words = Cause.NOT_REDUCED, f"left unreduced over {ranks_along(mesh, lacking)}: each rank keeps its own"
            if kept:
                cause, words = (
                    Cause.REDUCED_OVER_PART,
                    f"reduced over {ranks_along(mesh, kept)}, but not over {ranks_along(mesh, lacking)}",
                )
            yield _reduced(diverged, cause, names, words, Reduction(axes=kept))
            divided = f"{words}, but divided by the number of ranks"
            yield _reduced(diverged, cause, names, divided, Reduction(axes=kept, factor=1 / mesh.size(*lacking)))


def _not_of_all_microbatches(diverged: DivergedRun) -> Iterator[Counterfactual]:
    axes, count = diverged.data_axes, len(diverged.training.data.microbatches)
    if not axes or count == 1 or not diverged.can_be_emulated:
        return
    for numbers in dict.fromkeys((tuple(range(1, count)), tuple(range(count - 1)), (count - 1,), (0,))):
        which = f"microbatch{'' if len(numbers) == 1 else 'es'} {join_words([str(number) for number in numbers])}"
        words = f"the gradients of {which} are left unreduced over {ranks_along(diverged.mesh, axes)}"

        def change(ranks: EmulatedRanks, numbers: tuple[int, ...] = numbers) -> None:
            ranks.unreduced_microbatches, ranks.when_reduced = frozenset(numbers), EACH

        yield on_emulated_ranks(diverged, Cause.NOT_REDUCED, words, change)


def _scaled(diverged: DivergedRun, names: Sequence[str]) -> Iterator[Counterfactual]:
    """Gradient sums that are not divided, or divided twice, along axes with different rows."""
    several = len(diverged.training.data.microbatches) > 1
    for chosen in axis_combinations(diverged.data_axes):
        size, where = diverged.mesh.size(*chosen), ranks_along(diverged.mesh, chosen)
        for cause, factor, words in (
            (Cause.SUMMED, size, f"the sum over {where}, not the mean"),
            (Cause.AVERAGED_TWICE, 1 / size, f"averaged twice over {where}"),
        ):
            sentence = f"{gradients(diverged, names)} {words}"
            yield on_one_device(diverged, cause, sentence, multiplying_gradients(factor, names))
            if several and diverged.can_be_emulated:
                reduction = Reduction(axes=diverged.data_axes, factor=factor)
                yield _reduced(diverged, cause, names, f"{words}, at each microbatch", reduction)


def _reduced(diverged: DivergedRun, cause: Cause, names: Sequence[str], words: str, reduction: Reduction) -> Counterfactual:
    def change(ranks: EmulatedRanks) -> None:
        ranks.reductions.update(dict.fromkeys(names, reduction))

    return on_emulated_ranks(diverged, cause, f"{gradients(diverged, names)} {words}", change)


def wrong_factors(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Gradients multiplied or divided by an axis size, although ranks along this axis have the same rows."""
    for names in diverged.suspects:
        for chosen in axis_combinations(diverged.wide_axes):
            if not set(chosen) <= set(diverged.data_axes):
                size, where = diverged.mesh.size(*chosen), ranks_along(diverged.mesh, chosen)
                for cause, factor, words in (
                    (Cause.SUMMED, size, f"multiplied by the number of {where}, as if equal gradients were summed"),
                    (Cause.AVERAGED_TWICE, 1 / size, f"divided by the number of {where}, although nothing is averaged over them"),
                ):
                    sentence = f"{gradients(diverged, names)} {words}"
                    yield on_one_device(diverged, cause, sentence, multiplying_gradients(factor, names))


def constant_ratios(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """The constant ratio found in the first tensors that differ, applied to them and to all."""
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated)
    ratio = diverged.ratio(names, Phase.GRADIENT) if names else None
    if ratio is None:
        return
    is_scaler = abs(ratio) >= LEAST_SCALE and math.log2(abs(ratio)).is_integer()
    cause = Cause.NOT_UNSCALED if is_scaler else Cause.SCALED
    why = ", as if the loss had been scaled and gradients never unscaled" if is_scaler else count_description(diverged, ratio)
    for chosen in dict.fromkeys((names, diverged.updated)):
        words = f"{gradients(diverged, chosen)} {ratio:g} times as large as on one device"
        yield on_one_device(diverged, cause, words + why, multiplying_gradients(ratio, chosen))
        late = f"{words}, and unscaled only after clipping"
        yield on_one_device(diverged, cause, late, _scaling_until_clipped(chosen, ratio))


def _scaling_until_clipped(names: Sequence[str], ratio: float) -> Change:
    @contextmanager
    def undo_scaling(setup: Setup, _optimizer: torch.optim.Optimizer) -> Iterator[None]:
        for name, gradient in gradients_of(setup).items():
            if name in names:
                gradient.div_(ratio)
        yield

    def change(setup: Setup) -> None:
        multiplying_gradients(ratio, names)(setup)
        around_update(setup, partial(undo_scaling, setup))

    return change
