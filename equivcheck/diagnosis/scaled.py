"""Gradients that are all a constant multiple of what they should be, whatever the constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone
from equivcheck.diagnosis.reduction import scale
from equivcheck.diagnosis.words import gradients, number_of
from equivcheck.trace.differences import Phase
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause

LEAST_SCALE = 16.0
"""From here on a power of two is taken for the factor of a loss scaler."""


def constant_ratios(case: Case) -> Iterator[Counterfactual]:
    """The ratio of what differs first, for all that differs or for all."""
    names = tuple(name for name in case.differing(Phase.GRADIENT) if name in case.updated)
    ratio = ratio_of(case, names, Phase.GRADIENT) if names else None
    if ratio is None:
        return
    is_scaler = abs(ratio) >= LEAST_SCALE and math.log2(abs(ratio)).is_integer()
    cause = Cause.NOT_UNSCALED if is_scaler else Cause.SCALED
    why = ", as if it were never taken out of a scaled loss" if is_scaler else number_of(case, ratio)
    for chosen in dict.fromkeys((names, case.updated)):
        words = f"{gradients(case, chosen)} {ratio:g} times what they should be"
        yield alone(case, cause, words + why, _scaling(chosen, ratio))
        yield alone(case, cause, f"{words} until they have been clipped", _scaling_until_clipped(chosen, ratio))


def ratio_of(case: Case, names: Sequence[str], phase: Phase) -> float | None:
    """The ratio between both sides of all elements of some tensors, if it is one but 1; a whole number or its inverse if near."""
    found, expected = case.whole(case.first.step, phase), case.expected_values(case.first.step, phase)
    ratios = [
        (found[name] / expected[name])[expected[name] != 0.0].reshape(-1)
        for name in names
        if name in found and name in expected and found[name].shape == expected[name].shape
    ]
    values = np.concatenate(ratios) if ratios else np.empty(0)
    if not len(values) or not np.isfinite(values).all() or not values.all():
        return None
    ratio = float(np.median(values))
    if not np.allclose(values, ratio, rtol=1e-4) or math.isclose(ratio, 1.0, rel_tol=1e-4):
        return None
    for whole in (round(ratio), 1 / round(1 / ratio) if abs(ratio) < 1 else 0.0):
        if whole and math.isclose(whole, ratio, rel_tol=1e-4):
            return float(whole)
    return ratio


def _scaling(names: Sequence[str], ratio: float) -> Callable[[Setup], None]:
    return lambda setup: scale(setup, names, ratio)


def _scaling_until_clipped(names: Sequence[str], ratio: float) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        scale(setup, names, ratio)
        inner, parameters = setup.update, dict(setup.model.named_parameters())

        def update(optimizer: torch.optim.Optimizer) -> None:
            for name in names:
                gradient = parameters[name].grad
                if gradient is not None:
                    gradient.div_(ratio)
            inner(optimizer)

        setup.update = update

    return change
