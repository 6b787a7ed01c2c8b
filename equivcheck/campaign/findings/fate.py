"""What became of a finding between the torch that it was found with and the one that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from packaging.version import Version

from equivcheck.campaign.findings.again import Again, again, why_untold
from equivcheck.campaign.findings.finding import Finding
from equivcheck.oracle.known_issues.showing import Shows
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.system.choice import Choice


class Fate(Choice):
    """What a finding does when it is checked again; the values are what a summary calls it."""

    STILL = "still shows"
    NEW = "new here"
    DIFFERENTLY = "fails differently"
    KNOWN = "known issue"
    GONE = "no longer shows"
    NOT_YET = "does not show yet"
    UNTOLD = "cannot tell"

    @property
    def is_finding(self) -> bool:
        """Whether there is something to look at."""
        return self in (Fate.STILL, Fate.NEW, Fate.DIFFERENTLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A finding that was checked again."""

    finding: Finding
    """What was kept."""
    verdict: CaseVerdict
    """What a check says now."""
    fate: Fate
    """What became of it."""
    words: str
    """The same for people, with the versions: ``no longer shows: fixed between 2.13.0 and 2.14.1``."""


def replayed(finding: Finding, verdict: CaseVerdict, torch: str) -> Replayed:
    """What a check on a version of torch says about a finding."""
    fate, words = _told(finding, verdict, Version(Version(torch).public))
    return Replayed(finding=finding, verdict=verdict, fate=fate, words=words)


def _told(finding: Finding, verdict: CaseVerdict, here: Version) -> tuple[Fate, str]:
    found = again(finding.verdict, verdict)
    if found is Again.SHOWS:
        return _shows(finding, here)
    if found is Again.DOES_NOT:
        return _does_not(finding, here)
    if found is Again.KNOWN:
        return Fate.KNOWN, f"still shows, on file as {verdict.known}"
    fate = Fate.DIFFERENTLY if found is Again.DIFFERENTLY else Fate.UNTOLD
    return fate, f"{fate.value}: {why_untold(verdict)}"


def _shows(finding: Finding, here: Version) -> tuple[Fate, str]:
    """New is what the version measured before this one does not show."""
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
    return Fate.GONE, "no longer shows, on the torch that it was found with"


def _between(what: str, finding: Finding, before: Version, after: Version) -> str:
    """``fixed in 2.14.1`` if a bisection says that no version lies between, else ``fixed between 2.13.0 and 2.14.1``."""
    versions = finding.shown_in.versions if finding.shown_in else ()
    if (str(before), str(after)) in pairwise(versions):
        return f"{what} in {after}"
    return f"{what} between {before} and {after}"


def _known_of(finding: Finding) -> list[tuple[Version, bool]]:
    """The versions of which it is known whether the finding shows there, oldest first."""
    return sorted((dict(_measured(finding)) | {Version(Version(finding.environment.torch).public): True}).items())


def _measured(finding: Finding) -> Iterator[tuple[Version, bool]]:
    for found in finding.shown_in.measured if finding.shown_in else ():
        if found.showing.shows is not Shows.CANNOT_RUN:
            yield Version(found.torch), found.showing.shows is Shows.SHOWS
