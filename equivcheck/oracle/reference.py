"""The reference of a training: run once, kept, with the evidence that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equivcheck.oracle.floor import NUM_CONFIRMATIONS, NUM_PERTURBATIONS, Expected, expected_moments, perturbed
from equivcheck.oracle.verdict import Phase
from equivcheck.scenario import Training
from equivcheck.train.loop import train
from equivcheck.train.setup import single_device
from equivcheck.train.threads import one_thread

KEPT_REFERENCES = 64
"""References kept: the same training comes again under other layouts and while a scenario shrinks."""


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
    return _reference(training, NUM_PERTURBATIONS)


@lru_cache(maxsize=KEPT_REFERENCES)
def confirming_reference(training: Training) -> Reference:
    """The same with a noise floor from many more perturbed runs; what decides before a divergence is reported."""
    return _reference(training, NUM_PERTURBATIONS + NUM_CONFIRMATIONS)


def _reference(training: Training, num_perturbations: int) -> Reference:
    with one_thread():
        found = expected_moments(training, train(single_device(training)), perturbed(training, num_perturbations))
    return Reference(found, doubt_about(training, found))


def doubt_about(training: Training, found: tuple[Expected, ...]) -> str:
    """Why agreement with a reference of these moments would prove nothing; empty if it would."""
    if not all(np.isfinite(moment.norms).all() for moment in found):
        return "the reference has values that are not finite"
    if not any(moment.norms.any() for moment in found if moment.phase is Phase.GRADIENT):
        return "every gradient of the reference is zero"
    return _noise(training, found)


def _noise(training: Training, found: tuple[Expected, ...]) -> str:
    """Name the tensor of which more than half of the digits are noise, if there is one.

    Loss and norm are left out: a loss may be zero by cancellation, and has no other of its kind to be small against.
    """
    limit = float(np.sqrt(np.finfo(np.dtype(training.precision.value)).eps))
    for moment in found:
        noisy = np.flatnonzero(moment.tolerances > limit * moment.scales)
        if moment.phase is not Phase.LOSS and len(noisy):
            row = int(noisy[0])
            share = moment.tolerances[row] / moment.scales[row]
            name = moment.table.names[row]
            return f"rounding alone moves {name} by {share:.1g} of its kind at step {moment.step} ({moment.phase.value})"
    return ""
