"""Requirements on verdicts that several tests share."""

from __future__ import annotations

from equivcheck import Outcome, Scenario, Verdict, check
from equivcheck.oracle.verdict.verdict import Judgement
from equivcheck.worlds.trace.differences import Divergence


def require_predicted(scenario: Scenario) -> Verdict:
    """Require that ranks end with the values of one device, and that all their calls are predicted."""
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert not verdict.unmodelled
    return verdict


def first_divergence(verdict: Judgement) -> Divergence:
    """Require that a case diverged, and return where it did so first."""
    assert verdict.outcome is Outcome.DIVERGED, verdict.describe()
    assert verdict.divergence is not None
    return verdict.divergence
