"""Scenarios that the installed torch cannot run, or computes wrongly, as only versions before some newer one do."""

from __future__ import annotations

import pytest

from equivcheck import Scenario, Verdict
from equivcheck.composition.limits import why_unsupported
from equivcheck.known_issues.known import known_issues


def require_supported(scenario: Scenario) -> None:
    """Skip a test of a scenario that is beyond a limit of older versions of torch."""
    reason = why_unsupported(scenario) or ""
    if "(torch <" in reason:
        pytest.skip(reason)


def require_mended(verdict: Verdict) -> None:
    """Skip a test of a scenario that shows an issue of older versions of torch."""
    for issue in known_issues():
        if issue.id == verdict.known and "<" in issue.torch:
            pytest.skip(f"shows {issue.id} (torch {issue.torch})")
