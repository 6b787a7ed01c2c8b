"""Scenarios that the installed torch cannot run, or computes wrongly, as only versions before some newer one do."""

from __future__ import annotations

import importlib.util

import pytest

from equivcheck import Scenario, Verdict
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.known_issues.known import known_issues
from equivcheck.system.torch_version import is_torch_in

TYPED = pytest.mark.skipif(
    importlib.util.find_spec("spmd_types") is None or is_torch_in("<2.10"),
    reason="no dependency: users bring spmd_types, which imports parts of torch that came with 2.10",
)
"""Of tests with collectives of spmd_types."""


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
