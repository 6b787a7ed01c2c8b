"""The reference of a training: run once, kept, with the evidence that it gives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equivcheck.layouts.rounding import Rounding
from equivcheck.reference.coarse import coarse_moments
from equivcheck.reference.doubt import Doubt, doubt_about
from equivcheck.reference.noise import (
    NUM_CONFIRMATIONS,
    NUM_PERTURBATIONS,
    Expected,
    eps_of,
    expected_moments,
    perturbed,
)
from equivcheck.reference.optimizer_rounding import rounding_setup
from equivcheck.reference.rounded import rounded_setup
from equivcheck.reference.rounded_copies import reordered_traces, rounded_copies, unit_of
from equivcheck.reference.summation import split_trace, widely_clipped_trace
from equivcheck.scenario import Training
from equivcheck.trace.trace import Trace
from equivcheck.train.loop import train
from equivcheck.train.single_device import single_device
from equivcheck.train.threads import one_thread

KEPT_REFERENCES = 16
"""References kept, some hundred KiB each: the same training comes again under other layouts and while a scenario shrinks."""

NUM_ROUNDED = 3
"""Perturbed runs of a reference that rounds: they come one after the other, and most ranks leave the very bits of it."""
NUM_ROUNDED_CONFIRMATIONS = 16
"""Such runs before a divergence is believed: among them all orders of a ring of 8, and a rounding flipped in each."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What one device computes, and how sure that is."""

    moments: tuple[Expected, ...]
    """Every moment of the run."""
    doubt: Doubt | None
    """From where on agreement with it proves nothing, and why; None if it does at every step."""


def reference(training: Training, rounding: Rounding | None = None) -> Reference:
    """Run a training on one device, and again with perturbed inputs for its noise floor.

    Given what a layout rounds, the device rounds alike.
    """
    return _plain(training) if rounding is None else _rounded(training, rounding)


def coarse_reference(training: Training, rounding: Rounding | None = None) -> Reference:
    """The same of one run alone: what is beyond its tolerances is so far off that noise of that size would be a doubt.

    A doubt does not count against such a difference in the full judgement either, so that none is looked for.
    """
    trace = _trace(training) if rounding is None else _rounded_trace(training, rounding)
    return Reference(coarse_moments(trace, noise_limit(training, rounding)), doubt=None)


@lru_cache(maxsize=KEPT_REFERENCES)
def _trace(training: Training) -> Trace:
    with one_thread():
        return train(single_device(training))


@lru_cache(maxsize=KEPT_REFERENCES)
def _rounded_trace(training: Training, rounding: Rounding) -> Trace:
    with _quietly():
        return train(rounded_setup(training, rounding))


@lru_cache(maxsize=KEPT_REFERENCES)
def _plain(training: Training) -> Reference:
    with one_thread():
        found = expected_moments(training, _trace(training), perturbed(training, NUM_PERTURBATIONS))
    return Reference(found, doubt_about(found, noise_limit(training)))


@lru_cache(maxsize=KEPT_REFERENCES)
def _rounded(training: Training, rounding: Rounding) -> Reference:
    with _quietly():
        trace = _rounded_trace(training, rounding)
        copies = rounded_copies(training, rounding, trace, NUM_ROUNDED)
        found = expected_moments(training, trace, copies, eps=unit_of(training, rounding))
    return Reference(found, doubt_about(found, noise_limit(training, rounding)))


def confirming_reference(training: Training, num_parts: int, rounding: Rounding | None = None) -> Reference:
    """The same with a noise floor that decides before a divergence is reported.

    It comes from many more perturbed runs, and from other orders of arithmetic on one device, among them that of data parallelism
    over `num_parts` ranks: a gradient that is zero by cancellation inside an operation moves with those, not with its inputs.
    What an optimizer rounds to fewer digits on its way counts too: over shards it rounds in other places.
    """
    return _confirming_plain(training, num_parts) if rounding is None else _confirming_rounded(training, rounding)


@lru_cache(maxsize=KEPT_REFERENCES)
def _confirming_plain(training: Training, num_parts: int) -> Reference:
    with one_thread():
        found = expected_moments(
            training,
            _trace(training),
            perturbed(training, NUM_PERTURBATIONS + NUM_CONFIRMATIONS, rounding_setup(training)),
            split_trace(training, num_parts),
            widely_clipped_trace(training),
        )
    return Reference(found, doubt_about(found, noise_limit(training)))


@lru_cache(maxsize=KEPT_REFERENCES)
def _confirming_rounded(training: Training, rounding: Rounding) -> Reference:
    with _quietly():
        trace = _rounded_trace(training, rounding)
        copies = rounded_copies(training, rounding, trace, NUM_ROUNDED_CONFIRMATIONS, flips=True)
        others = reordered_traces(training, rounding)
        found = expected_moments(training, trace, copies, *others, eps=unit_of(training, rounding))
    return Reference(found, doubt_about(found, noise_limit(training, rounding)))


@contextmanager
def _quietly() -> Iterator[None]:
    """Compute with one thread, and without torch's remarks on types that meet under autocast."""
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def noise_limit(training: Training, rounding: Rounding | None = None) -> float:
    """The share of a tensor's kind below which a difference is less than half of the digits: the square root of eps.

    Digits are those of the coarsest element type that the training passes through.
    """
    own = (training.precision.value, training.optimizer.rounds_to)
    kinds = (*filter(None, own), *(rounding.element_types if rounding is not None else ()))
    return float(np.sqrt(max(map(eps_of, kinds))))
