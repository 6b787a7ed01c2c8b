"""How often a worker checks what may end as a known issue, and what it checks instead: such a check shows nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from equivcheck.oracle.known_issues.avoiding import avoiding, could_show
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.scenario import Scenario
from equivcheck.scenario.case import Case

KNOWN_SHARE = 0.1
"""Of the checks of a layout, or of programs, at most, those that end as a known issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A case that a worker may check."""

    case: Any
    """As it was drawn, or changed."""
    could_show: frozenset[str] = frozenset()
    """The known issues that it has the needs of."""
    avoided: frozenset[str] = frozenset()
    """Those that what was drawn had the needs of, if it was changed so that none can show."""

    def told(self, verdict: CaseVerdict) -> frozenset[str]:
        """The known issues of which a check of it tells whether they show: what ends as one may hide others."""
        if verdict.outcome is Outcome.KNOWN:
            return frozenset((verdict.known,))
        return self.could_show if verdict.outcome is Outcome.EQUIVALENT else frozenset()


class Avoidance:
    """Leaves a case as it is while the known issues that could show in it have not shown too often, else has it avoid them.

    An issue that was not met yet may always show. From then on a check counts as likely to end as an issue as those before it
    did, so that what has been mended in torch is checked as any other case.
    """

    def __init__(self) -> None:
        self._checked: Counter[str] = Counter()
        self._ended_known: Counter[str] = Counter()
        self._told: Counter[tuple[str, str]] = Counter()
        self._shown: Counter[tuple[str, str]] = Counter()
        self._met: set[str] = set()

    def candidate(self, case: Case) -> Candidate | None:
        """What to check for a case that was drawn; None where issues that have shown too often cannot be avoided."""
        issues = _issues(case)
        if self._affords(case.counted_by[0], issues):
            return Candidate(case=case, could_show=issues)
        return avoiding_all(case)

    def count(self, candidate: Candidate, verdict: CaseVerdict) -> None:
        """Count a check."""
        layout = candidate.case.counted_by[0]
        self._checked[layout] += 1
        self._ended_known[layout] += verdict.outcome is Outcome.KNOWN
        self._told.update((layout, issue) for issue in candidate.told(verdict))
        self._shown[layout, verdict.known] += 1
        self._met |= candidate.could_show

    def _affords(self, layout: str, issues: frozenset[str]) -> bool:
        """Whether one more check that could show some issues keeps a layout within its share, or is the first of one."""
        if not issues or not issues <= self._met:
            return True
        likely = max(self._likelihood(layout, issue) for issue in issues)
        return self._ended_known[layout] + likely <= KNOWN_SHARE * (self._checked[layout] + 1)

    def _likelihood(self, layout: str, issue: str) -> float:
        """How likely a check is to end as an issue that could show: certain until one did not."""
        return (self._shown[layout, issue] + 1) / (self._told[layout, issue] + 1)


@singledispatch
def _issues(case: Case) -> frozenset[str]:
    """The identifiers of known issues that could show in a case."""
    raise TypeError(f"{type(case).__name__} is no case")


@_issues.register
def _(scenario: Scenario) -> frozenset[str]:
    return frozenset(issue.id for issue in could_show(scenario))


@_issues.register
def _(program: TensorProgram) -> frozenset[str]:
    """Those of its operations: what may show in any operation would leave out all programs."""
    return frozenset(known.id for known in ON_FILE if known.operations and known.could_show(program))


@singledispatch
def avoiding_all(case: Case) -> Candidate | None:
    """The case changed so that no known issue can show, if one could; None where that cannot be, as in programs."""
    return None if _issues(case) else Candidate(case=case)


@avoiding_all.register
def _(scenario: Scenario) -> Candidate | None:
    changed = avoiding(scenario)
    return None if changed is None else Candidate(case=changed, avoided=_issues(scenario))
