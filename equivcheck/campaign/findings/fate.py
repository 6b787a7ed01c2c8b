"""Checks findings again under the installed torch version: are they still there, fixed, or another failure?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from packaging.version import Version

from equivcheck.campaign.findings.finding import Finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.system.choice import PrintableEnum


class Recheck(PrintableEnum):
    """Answer of a later check: does the finding's case still fail in the same way?"""

    SHOWS = "shows"
    KNOWN = "known"
    DIFFERENTLY = "differently"
    DOES_NOT = "does_not"
    UNTOLD = "untold"


def compare_recheck(kept: CaseVerdict, verdict: CaseVerdict) -> Recheck:
    """Compare a later verdict with the verdict `kept` in the store.

    Returns `UNTOLD` if the later verdict is undecided: the case did not fail, but not all its steps are known to agree.
    """
    if verdict.is_clear:
        return Recheck.DOES_NOT
    if not (verdict.outcome.is_finding or verdict.outcome is Outcome.KNOWN):
        return Recheck.UNTOLD
    is_known = verdict.outcome is Outcome.KNOWN
    as_found = replace(verdict, outcome=kept.outcome) if is_known else verdict
    if fingerprint(as_found) != fingerprint(kept):
        return Recheck.DIFFERENTLY
    return Recheck.KNOWN if is_known else Recheck.SHOWS


def undecided_reason(verdict: CaseVerdict) -> str:
    """Describe an undecided verdict in one line: ``unsupported: torch 2.9 has no ...``."""
    return ": ".join(filter(None, (verdict.outcome.value, verdict.reason or verdict.undecided)))


def showing_of_recheck(kept: CaseVerdict, verdict: CaseVerdict) -> Showing:
    """Return whether the case still fails with the installed torch. `kept` is the stored verdict, `verdict` the new one.

    The result is `CANNOT_RUN` if the case fails in another way, or if the new verdict is undecided.
    """
    found = compare_recheck(kept, verdict)
    if found is Recheck.DOES_NOT:
        return Showing(shows=Shows.DOES_NOT)
    if found in (Recheck.SHOWS, Recheck.KNOWN):
        return Showing(shows=Shows.SHOWS, reason=f"the known issue {verdict.known}" if verdict.known else "")
    another = "fails in another way, " if found is Recheck.DIFFERENTLY else ""
    return Showing(shows=Shows.CANNOT_RUN, reason=f"{another}{undecided_reason(verdict)}")


class Fate(PrintableEnum):
    """Result of checking a finding's case again. Summaries print the members' values."""

    STILL = "still shows"
    NEW = "new here"
    DIFFERENTLY = "fails differently"
    KNOWN = "known issue"
    GONE = "no longer shows"
    NOT_YET = "does not show yet"
    UNTOLD = "cannot tell"

    @property
    def is_finding(self) -> bool:
        """Whether the finding still needs attention."""
        return self in (Fate.STILL, Fate.NEW, Fate.DIFFERENTLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedFinding:
    """A stored finding with the verdict from checking its case again."""

    finding: Finding
    """The finding from the store."""
    verdict: CaseVerdict
    """Verdict from the new check."""
    fate: Fate
    """Change since the finding was stored, such as ``no longer shows``."""
    words: str
    """Change since the finding was stored, with torch versions, such as ``no longer shows: fixed between 2.13.0 and 2.14.1``."""


def replayed(finding: Finding, verdict: CaseVerdict, torch: str) -> ReplayedFinding:
    """Compare a stored finding with a new verdict on its case. `torch` is the version in the new check."""
    fate, words = _fate(finding, verdict, Version(Version(torch).public))
    return ReplayedFinding(finding=finding, verdict=verdict, fate=fate, words=words)


def _fate(finding: Finding, verdict: CaseVerdict, here: Version) -> tuple[Fate, str]:
    found = compare_recheck(finding.verdict, verdict)
    if found is Recheck.SHOWS:
        return _shows(finding, here)
    if found is Recheck.DOES_NOT:
        return _does_not(finding, here)
    if found is Recheck.KNOWN:
        return Fate.KNOWN, f"still shows, known as {verdict.known}"
    fate = Fate.DIFFERENTLY if found is Recheck.DIFFERENTLY else Fate.UNTOLD
    return fate, f"{fate.value}: {undecided_reason(verdict)}"


def _shows(finding: Finding, here: Version) -> tuple[Fate, str]:
    before = [(version, shows) for version, shows in _known_of(finding) if version < here]
    if before and not before[-1][1]:
        return Fate.NEW, f"new here: does not show in {before[-1][0]}"
    return Fate.STILL, Fate.STILL.value


def _does_not(finding: Finding, here: Version) -> tuple[Fate, str]:
    known = [(version, shows) for version, shows in _known_of(finding) if version != here]
    shown = [version for version, shows in known if shows]
    older = [version for version in shown if version < here]
    if older:
        after = [version for version, shows in known if not shows and older[-1] < version < here]
        return Fate.GONE, f"no longer shows: {_between('fixed', finding, older[-1], min([*after, here]))}"
    if shown:
        before = [version for version, shows in known if not shows and here < version < shown[0]]
        return Fate.NOT_YET, f"does not show yet: {_between('begins', finding, max([*before, here]), shown[0])}"
    return Fate.GONE, "no longer shows, on the torch version with which it was found"


def _between(what: str, finding: Finding, before: Version, after: Version) -> str:
    """Return ``fixed in 2.14.1`` if a bisection tests no version between the two, else ``fixed between 2.13.0 and 2.14.1``."""
    versions = finding.shown_in.versions if finding.shown_in else ()
    if (str(before), str(after)) in pairwise(versions):
        return f"{what} in {after}"
    return f"{what} between {before} and {after}"


def _known_of(finding: Finding) -> list[tuple[Version, bool]]:
    """Return the versions with a known answer, oldest first."""
    return sorted((dict(_measured(finding)) | {Version(Version(finding.environment.torch).public): True}).items())


def _measured(finding: Finding) -> Iterator[tuple[Version, bool]]:
    for found in finding.shown_in.measured if finding.shown_in else ():
        if found.showing.shows is not Shows.CANNOT_RUN:
            yield Version(found.torch), found.showing.shows is Shows.SHOWS
