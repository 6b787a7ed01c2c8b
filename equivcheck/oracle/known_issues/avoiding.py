"""Which upstream issues on file could show in a scenario, and the scenario next to it in which none can."""

from __future__ import annotations

from equivcheck.layouts.composition.limits import MAX_REPAIRS
from equivcheck.oracle.known_issues.known import KnownIssue, known_issues
from equivcheck.scenario import Scenario


def could_show(scenario: Scenario) -> tuple[KnownIssue, ...]:
    """The issues of the installed torch that have in a scenario what they need."""
    return tuple(issue for issue in known_issues() if issue.could_show(scenario))


def avoiding(scenario: Scenario) -> Scenario | None:
    """The scenario with the workarounds of all that could show; None where one has none that can run."""
    found: Scenario | None = scenario
    for _ in range(MAX_REPAIRS):
        issues = could_show(found) if found is not None else ()
        if found is None or not issues:
            return found
        found = issues[0].avoided(found)
    return None
