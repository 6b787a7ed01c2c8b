"""First step in which agreement with a reference proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equivcheck.oracle.reference.noise import Expected
from equivcheck.training.ensemble import EnsembleTrace
from equivcheck.worlds.trace.differences import Phase

NO_GRADIENT = "all gradients of the single-device run are zero"
"""Reason for a doubt: all gradients are zero, so wrong ranks would agree too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """First step whose agreement with the reference proves nothing, and the reason. Later steps prove nothing either."""

    reason: str
    """Why agreement proves nothing, as one sentence for the verdict."""
    step: int
    """Step, from 0. Earlier steps are decided."""


def doubt_about(
    found: tuple[Expected, ...], limit: float, copies: EnsembleTrace | None = None, *, needs_gradients: bool = True
) -> Doubt | None:
    """Return the first step whose agreement with the reference proves nothing, and the reason. None if there is no such step.

    A step is in doubt if noise exceeds `limit` times the largest tensor of the same kind. It is also in doubt if a perturbed copy
    in `copies` chooses other experts for a token than the unchanged copy. If no gradient differs from zero, all steps are in
    doubt, unless `needs_gradients` is False.
    """
    gradients = [moment.step for moment in found if moment.phase is Phase.GRADIENT and moment.norms.any()]
    if needs_gradients and not gradients:
        return Doubt(reason=NO_GRADIENT, step=0)
    reasons = ((_not_finite(moment) or _noise(moment, limit) or _disagreement(moment), moment.step) for moment in found)
    lost = next((Doubt(reason=reason, step=step) for reason, step in reasons if reason), None)
    if copies is not None:
        chosen = next((index for index, step in enumerate(copies.steps) if not step.routes_alike), None)
        changes = f"rounding changes the chosen experts at step {chosen}"
        lost = lost if chosen is None else earlier_doubt(Doubt(reason=changes, step=chosen), lost)
    if lost is not None and lost.step <= min(gradients, default=0):
        return Doubt(reason=lost.reason, step=0)
    return lost


def earlier_doubt(one: Doubt | None, other: Doubt | None) -> Doubt | None:
    """Return the doubt with the earlier step, or `one` if both have the same step. None stands for no doubt."""
    return min(filter(None, (one, other)), key=lambda doubt: doubt.step, default=None)


def first_step_dominated_by_noise(found: tuple[Expected, ...], limit: float) -> int | None:
    """Return the first step in which rounding noise exceeds the values, such as in a training that explodes.

    None if there is no such step. A step does not count if its noise is at most `limit` times the largest tensor of the same kind
    in earlier steps. Otherwise a gradient that cancels to almost zero would count.
    """
    largest: dict[Phase, float] = {}
    for moment in found:
        if moment.phase in (Phase.LOSS, Phase.REPORTED) or not len(moment.norms):
            continue
        before = largest.get(moment.phase)
        if before is not None and (moment.tolerances > np.maximum(moment.scales, limit * before)).any():
            return moment.step
        largest[moment.phase] = max(before or 0.0, float(moment.scales.max()))
    return None


def tensors_with_uncertain_signs(found: tuple[Expected, ...], step: int) -> frozenset[str]:
    """Return the tensors that have a very small gradient element at `step`: not zero, but at most the tolerance.

    Rounding may change the sign of such an element. Perturbed inputs rarely change the sign, because they change the element less
    than another summation order does.
    """
    gradients = (moment for moment in found if moment.phase is Phase.GRADIENT and moment.step == step)
    return frozenset(name for moment in gradients for name in _turning(moment))


def _turning(moment: Expected) -> Iterator[str]:
    table = moment.table
    ends = (*table.offsets[1:], table.total)
    for name, start, end, tolerance in zip(table.names, table.offsets, ends, moment.tolerances, strict=True):
        sizes = np.abs(moment.values[start:end])
        if ((sizes > 0) & (sizes <= tolerance)).any():
            yield name


def _not_finite(moment: Expected) -> str:
    if not np.isfinite(moment.norms).all():
        return f"the single-device run has values that are not finite {_when(moment)}"
    if not np.isfinite(moment.tolerances).all():
        return f"rounding makes values of the single-device run infinite or NaN {_when(moment)}"
    return ""


def _noise(moment: Expected, limit: float) -> str:
    # A loss or a norm can be zero by cancellation, and has no other tensor of its kind to compare its noise with.
    noisy = np.flatnonzero(moment.tolerances > limit * moment.scales)
    if moment.phase in (Phase.LOSS, Phase.REPORTED) or not len(noisy):
        return ""
    name, tolerance, scale = moment.table.names[noisy[0]], moment.tolerances[noisy[0]], moment.scales[noisy[0]]
    if scale == 0.0:
        return f"{name} and all tensors of its kind are zero except for rounding {_when(moment)}"
    return f"rounding noise in {name} is {100 * tolerance / scale:.1g} % of the largest tensor of its kind {_when(moment)}"


def _disagreement(moment: Expected) -> str:
    far = np.flatnonzero(moment.shifts > moment.tolerances)
    return f"two ways to compute {moment.table.names[int(far[0])]} on one device disagree {_when(moment)}" if len(far) else ""


def _when(moment: Expected) -> str:
    return f"at step {moment.step} ({moment.phase.value})"
