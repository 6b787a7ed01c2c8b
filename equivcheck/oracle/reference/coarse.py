"""A reference from one run, for differences that are too large for any rounding noise.

Perturbed runs take most time in a check, but they decide about small differences only. A shrinking scenario shows the same large
difference again and again, so its checks skip perturbed runs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

from equivcheck.oracle.reference.noise import Expected, expected_of
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.trace import Trace


def expected_with_coarse_tolerances(reference: Trace, limit: float) -> tuple[Expected, ...]:
    """Return the expected values at each point in each step, from one single-device run, with tolerances that need no second run.

    The tolerance of a tensor is `limit` times the largest norm among tensors of the same kind, such as gradients. A full check
    also reports a difference above this tolerance, however large the noise is that it measures.
    """
    unperturbed = expected_of(reference, repeat(None), limit)
    return tuple(replace(moment, tolerances=limit * moment.scales) for moment in unperturbed)


def is_large(divergences: tuple[Divergence, ...]) -> bool:
    """Whether a tensor other than a loss differs by more than the coarse tolerance.

    A loss can be zero by cancellation and is the only tensor of its kind, so its size says nothing about its noise.
    """
    return any(divergence.phase is not Phase.LOSS for divergence in divergences)
