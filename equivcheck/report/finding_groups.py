"""Findings grouped by cause."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from equivcheck.campaign.events import KeptFinding
from equivcheck.campaign.findings.example import is_shrunk
from equivcheck.campaign.findings.fingerprint import what_is_wrong
from equivcheck.campaign.findings.size import Size, size_of
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome

_UNFINISHED = "unfinished"
"""Group for findings that were neither shrunk nor explained before the campaign was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingGroup:
    """Findings with one cause, in one or several layouts."""

    findings: tuple[KeptFinding, ...]
    """At least one, best example first: explained exactly, then smallest."""

    @property
    def example(self) -> KeptFinding:
        """The finding to show."""
        return self.findings[0]

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of its layouts, each once."""
        return tuple(dict.fromkeys(finding.verdict.case.counted_by[0] for finding in self.findings))


def groups_of(findings: Iterable[KeptFinding]) -> tuple[FindingGroup, ...]:
    """Group findings by cause, in order of discovery."""
    found: dict[Hashable, list[KeptFinding]] = {}
    for finding in findings:
        found.setdefault(_cause_of(finding.verdict), []).append(finding)
    return tuple(FindingGroup(findings=tuple(sorted(members, key=_order))) for members in found.values())


def _cause_of(verdict: CaseVerdict) -> Hashable:
    """The diagnosed cause. Without a diagnosis, findings with the same error or difference share a cause."""
    if verdict.outcome is Outcome.DIVERGED and verdict.diagnosis is not None:
        return verdict.diagnosis.cause
    return what_is_wrong(verdict) if is_shrunk(verdict) else _UNFINISHED


def _order(finding: KeptFinding) -> tuple[bool, bool, Size]:
    verdict = finding.verdict
    is_exact = verdict.diagnosis is not None and verdict.diagnosis.exact
    return not is_exact, not is_shrunk(verdict), size_of(verdict.case)
