"""Find known issues that a scenario could show, and a similar scenario without them."""

from __future__ import annotations

from equivcheck.layouts.composition.limits import MAX_REPAIRS
from equivcheck.oracle.known_issues.known import KnownIssue, known_issues
from equivcheck.scenario import Scenario


def could_show(scenario: Scenario) -> tuple[KnownIssue, ...]:
    """Known issues of the installed torch whose needs a scenario meets."""
    return tuple(issue for issue in known_issues() if issue.could_show(scenario))


def avoiding(scenario: Scenario) -> Scenario | None:
    """A similar scenario that can show no known issue. None if no workaround leads to a scenario that can run."""
    found: Scenario | None = scenario
    for _ in range(MAX_REPAIRS):
        issues = could_show(found) if found is not None else ()
        if found is None or not issues:
            return found
        found = issues[0].avoided(found)
    return None
