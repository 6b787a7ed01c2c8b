"""A script's tolerance, from the rounding measured by the check."""

from __future__ import annotations

import math
from collections.abc import Iterator

from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.scenario import Scenario
from equivcheck.worlds.trace.differences import Divergence, Phase

_COMPARED = (Phase.LOSS, Phase.GRADIENT, Phase.CLIPPING, Phase.UPDATE)
"""Phases a script compares."""


def tolerance_of(scenario: Scenario, verdict: Verdict | None = None) -> float:
    """Largest tolerance among the compared tensors; if that hides the divergence, the tolerance of the diverged tensor."""
    moments = ReferenceRun.of(scenario).confirming_reference().moments
    compared = (moment for moment in moments if moment.phase in _COMPARED)
    everything = max((float(value) for moment in compared for value in moment.tolerances if math.isfinite(value)), default=0.0)
    divergence = None if verdict is None else verdict.divergence
    if divergence is None or _size(divergence) > everything:
        return everything
    own = [value for moment in moments for value in _of_tensor(moment, divergence)]
    return min([everything, *own])


def _of_tensor(moment: Expected, divergence: Divergence) -> Iterator[float]:
    row = moment.table.rows.get(divergence.tensor)
    if row is not None and (moment.step, moment.phase) == (divergence.step, divergence.phase):
        yield float(moment.tolerances[row])


def _size(divergence: Divergence) -> float:
    """Error in the worst element; infinite if a value is not a number."""
    try:
        return abs(float(divergence.actual) - float(divergence.expected))
    except ValueError:
        return math.inf
