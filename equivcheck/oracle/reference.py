"""The reference of a training: run once, kept, with the evidence that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equivcheck.oracle.floor import NUM_CONFIRMATIONS, NUM_PERTURBATIONS, Expected, expected_moments, perturbed, split_trace
from equivcheck.oracle.verdict import Phase
from equivcheck.scenario import Training
from equivcheck.train.loop import train
from equivcheck.train.setup import single_device
from equivcheck.train.threads import one_thread

KEPT_REFERENCES = 16
"""References kept, some hundred KiB each: the same training comes again under other layouts and while a scenario shrinks."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What one device computes, and how sure that is."""

    moments: tuple[Expected, ...]
    """Every moment of the run."""
    doubt: str
    """Why agreement with it would prove nothing; empty if it does."""


@lru_cache(maxsize=KEPT_REFERENCES)
def reference(training: Training) -> Reference:
    """Run a training on one device, and again with perturbed inputs for its noise floor."""
    with one_thread():
        found = expected_moments(training, train(single_device(training)), perturbed(training, NUM_PERTURBATIONS))
    return Reference(found, doubt_about(training, found))


@lru_cache(maxsize=KEPT_REFERENCES)
def confirming_reference(training: Training, num_parts: int) -> Reference:
    """The same with a noise floor that decides before a divergence is reported.

    It comes from many more perturbed runs, and from other orders of arithmetic on one device, among them that of data parallelism
    over `num_parts` ranks: a gradient that is zero by cancellation inside an operation moves with those, not with its inputs.
    """
    with one_thread():
        found = expected_moments(
            training,
            train(single_device(training)),
            perturbed(training, NUM_PERTURBATIONS + NUM_CONFIRMATIONS),
            split_trace(training, num_parts),
        )
    return Reference(found, doubt_about(training, found))


def noise_limit(training: Training) -> float:
    """The share of a tensor's kind below which a difference is less than half of the digits: the square root of eps."""
    return float(np.sqrt(np.finfo(np.dtype(training.precision.value)).eps))


def doubt_about(training: Training, found: tuple[Expected, ...]) -> str:
    """Why agreement with a reference of these moments would prove nothing; empty if it would."""
    if not all(np.isfinite(moment.norms).all() for moment in found):
        return "the reference has values that are not finite"
    if not any(moment.norms.any() for moment in found if moment.phase is Phase.GRADIENT):
        return "every gradient of the reference is zero"
    return _noise(training, found) or _disagreement(found)


def _disagreement(found: tuple[Expected, ...]) -> str:
    """Name the tensor that an independent way of running the same training finds elsewhere than rounding allows."""
    for moment in found:
        far = np.flatnonzero(moment.shifts > moment.tolerances)
        if len(far):
            name = moment.table.names[int(far[0])]
            return f"two ways to compute {name} on one device disagree at step {moment.step} ({moment.phase.value})"
    return ""


def _noise(training: Training, found: tuple[Expected, ...]) -> str:
    """Name the tensor of which more than half of the digits are noise, if there is one.

    Loss and norm are left out: a loss may be zero by cancellation, and has no other of its kind to be small against.
    """
    limit = noise_limit(training)
    for moment in found:
        noisy = np.flatnonzero(moment.tolerances > limit * moment.scales)
        if moment.phase is not Phase.LOSS and len(noisy):
            row = int(noisy[0])
            share = moment.tolerances[row] / moment.scales[row]
            name = moment.table.names[row]
            return f"rounding alone moves {name} by {share:.1g} of its kind at step {moment.step} ({moment.phase.value})"
    return ""
