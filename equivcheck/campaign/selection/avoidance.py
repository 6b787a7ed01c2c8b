"""Avoids known issues. A check that ends as a known issue shows nothing else, so workers change most such cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from equivcheck.oracle.known_issues.known import could_show, without_known_issues
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Checkable

KNOWN_SHARE = 0.1
"""Largest share of a layout's checks that may end as a known issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A case that a worker may check next. It may have been changed to avoid known issues."""

    case: Any
    """The drawn case, or the case after the change."""
    could_show: frozenset[str] = frozenset()
    """Ids of known issues that the case could show."""
    avoided: frozenset[str] = frozenset()
    """Ids of known issues that the case could show before the change. Empty if it was not changed."""

    def issues_decided_by(self, verdict: CaseVerdict) -> frozenset[str]:
        """Return the ids of known issues for which the verdict shows whether they still exist.

        A verdict KNOWN answers this only for the issue that it names, because this issue may hide others. EQUIVALENT answers it
        for all issues that the case could show.
        """
        if verdict.outcome is Outcome.KNOWN:
            return frozenset((verdict.known,))
        return self.could_show if verdict.outcome is Outcome.EQUIVALENT else frozenset()


class Avoidance:
    """Changes drawn cases, so that few checks end as a known issue.

    An issue is avoided only after the first check of a case that could show it. From then on, the share of such checks that
    showed the issue predicts whether the next check will. If torch fixes the issue, this share falls, and the issue is no longer
    avoided.
    """

    def __init__(self) -> None:
        self._checked: Counter[str] = Counter()
        self._ended_known: Counter[str] = Counter()
        self._decided: Counter[tuple[str, str]] = Counter()
        self._shown: Counter[tuple[str, str]] = Counter()
        self._met: set[str] = set()

    def candidate(self, case: Checkable) -> Candidate | None:
        """Return the drawn case, or the case changed to avoid known issues. Returns None if these cannot be avoided."""
        issues = _issues(case)
        if self._affords(case.summary_row[0], issues):
            return Candidate(case=case, could_show=issues)
        return avoiding_all(case)

    def count(self, candidate: Candidate, verdict: CaseVerdict) -> None:
        """Count the verdict on a candidate, and whether it showed known issues."""
        layout = candidate.case.summary_row[0]
        self._checked[layout] += 1
        self._ended_known[layout] += verdict.outcome is Outcome.KNOWN
        self._decided.update((layout, issue) for issue in candidate.issues_decided_by(verdict))
        self._shown[layout, verdict.known] += 1
        self._met |= candidate.could_show

    def _affords(self, layout: str, issues: frozenset[str]) -> bool:
        """Whether one more check that could show these issues keeps the layout within its share, or is the first for an issue."""
        if not issues or not issues <= self._met:
            return True
        # A check counts as certain to end as an issue until one check did not show the issue.
        likely = max((self._shown[layout, issue] + 1) / (self._decided[layout, issue] + 1) for issue in issues)
        return self._ended_known[layout] + likely <= KNOWN_SHARE * (self._checked[layout] + 1)


@singledispatch
def _issues(case: Checkable) -> frozenset[str]:
    """Ids of known issues that could show in a case."""
    raise TypeError(f"case is not valid: its class is {type(case).__name__}. Expected Scenario or TensorProgram")


@_issues.register
def _(scenario: Scenario) -> frozenset[str]:
    return frozenset(issue.id for issue in could_show(scenario))


@_issues.register
def _(program: TensorProgram) -> frozenset[str]:
    """Return only issues in single operations, because avoiding issues in any operation would leave out all programs."""
    return frozenset(known.id for known in ON_FILE if known.operations and known.could_show(program))


@singledispatch
def avoiding_all(case: Checkable) -> Candidate | None:
    """Return the case, changed so that no known issue can show. Returns None if no change helps. Programs are never changed."""
    return None if _issues(case) else Candidate(case=case)


@avoiding_all.register
def _(scenario: Scenario) -> Candidate | None:
    changed = without_known_issues(scenario)
    return None if changed is None else Candidate(case=changed, avoided=_issues(scenario))
