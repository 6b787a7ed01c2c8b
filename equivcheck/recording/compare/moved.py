"""Rejects moved runs that are not like run A. Their distance counts as rounding noise, so another training hides mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from equivcheck.errors import UsageError
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.samples import compare_samples
from equivcheck.recording.compare.settings import other_settings
from equivcheck.recording.compare.tensors import FLOOR, GRADIENTS, Tolerance
from equivcheck.recording.trace import Moment

_MOVE = 8.0
"""Maximum distance between initial parameters, in machine epsilons.
Each parameter moves by one eps plus a rounding error, and a distance is an estimate."""


def require_like_first(first: RecordedRun, moved: RecordedRun, steps: Sequence[int]) -> None:
    """Raise `UsageError` if `moved` is not run A's training repeated with initial parameters perturbed in the last bit."""
    problem = _problem(first, moved, steps)
    if problem:
        raise UsageError(
            f"moved run {moved.folder} is not valid: {problem}. "
            f"Expected the training of {first.folder}, recorded again with --moved."
        )


def _problem(first: RecordedRun, moved: RecordedRun, steps: Sequence[int]) -> str:
    if not moved.ranks[0].header.moved:
        return "its initial parameters were not moved"
    missing = [step for step in steps if step not in moved.records]
    if missing:
        return f"it has no step {missing[0]}"
    for key, tensor in first.tensors.items():
        other = moved.tensors.get(key)
        if key[0] in steps and (other is None or other.shapes != tensor.shapes or other.dtypes != tensor.dtypes):
            return f"{key[2]} is missing or has another form at step {key[0]} ({key[1].value})"
    if steps and (others := other_settings(first, moved, list(steps))):
        setting = others[0]
        return f"{setting.name} is {setting.values[1]}, not {setting.values[0]}, at step {setting.step}"
    for step in steps:
        samples = compare_samples(first, moved, step)
        if samples is not None and samples.difference and not samples.has_other_form:
            return f"its samples at step {step} are not those of {first.folder}"
    return _implausible(first, moved, steps)


def _implausible(first: RecordedRun, moved: RecordedRun, steps: Sequence[int]) -> str:
    """Describe distances that moving parameters by eps cannot cause, at the start and in the first gradients.

    Empty if there are none.
    """
    tolerance = Tolerance(first=first, moved=(moved,))
    for key, tensor in first.tensors.items():
        if key[0] not in steps[:1] or not tensor.eps or tensor.sketch.value is None or not tensor.is_finite:
            continue
        noise, size = tolerance.noise(key), first.size(key)
        if key[1] is Moment.START and noise > _MOVE * tensor.eps * size:
            return f"it starts from another {key[2]}"
        if key[1] in GRADIENTS and noise > largest_noise(max(tensor.eps, first.output_eps)) * size:
            return (
                f"its first gradient of {key[2]} differs by {noise / size:.1g} of its norm, which is more than rounding. If the "
                "training draws random numbers, set its seed"
            )
    return ""


def largest_noise(eps: float) -> float:
    """Largest relative error that rounding can plausibly cause in the first step's gradients: half of the dtype's digits.

    `eps` is the dtype's machine epsilon.
    """
    return max(math.sqrt(eps), FLOOR * eps)
