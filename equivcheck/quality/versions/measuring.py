"""Bisection over torch versions, to find the versions in which a finding or known issue shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from packaging.version import Version

from equivcheck.campaign.findings.fate import showing_of_recheck
from equivcheck.campaign.findings.finding import Finding, verdict_from
from equivcheck.campaign.findings.versions import Method, ShownIn, VersionAnswer
from equivcheck.oracle.known_issues.known import KnownIssue
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.description import failure_line
from equivcheck.quality.versions.environments import Environments, Installation, NoEnvironment, run_python
from equivcheck.quality.versions.scripts import Script, of_finding, of_issue

Measure = Callable[[Version], Showing]
"""Function that returns whether something shows on a torch version."""


def bisect_versions(versions: Sequence[Version], measure: Measure, first: Iterable[Version] = ()) -> tuple[VersionAnswer, ...]:
    """Call `measure` for the first and last version and those in `first`, then bisect between neighbours with different results.

    If no measured version shows the failure, all versions are measured. A failure that appears and disappears between two
    versions with the same result is missed.
    """
    found = {version: measure(version) for version in dict.fromkeys([versions[0], versions[-1], *first])}
    while (following := _next(versions, found)) is not None:
        found[following] = measure(following)
    return tuple(VersionAnswer(torch=str(version), showing=found[version]) for version in sorted(found))


def _next(versions: Sequence[Version], found: dict[Version, Showing]) -> Version | None:
    """Return the middle of the widest gap that may contain a change; None if there is no such gap."""
    shows_somewhere = any(showing.shows is Shows.SHOWS for showing in found.values())
    measured = [place for place, version in enumerate(versions) if version in found]
    gaps = [
        (before, after)
        for before, after in pairwise(measured)
        if after - before > 1 and not (shows_somewhere and found[versions[before]].shows is found[versions[after]].shows)
    ]
    if not gaps:
        return None
    before, after = max(gaps, key=lambda gap: gap[1] - gap[0])
    return versions[(before + after) // 2]


Try = Callable[[Installation, float], Showing]
"""Function that returns whether something shows on an installation, within a limit in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Versions to search, and settings for the search."""

    versions: tuple[Version, ...]
    """Versions, oldest first."""
    environments: Environments
    """Finds or creates each version's installation."""
    seconds: float
    """Limit in seconds per version."""
    every: bool = False
    """Whether to measure all versions instead of bisecting."""

    def of_issue(self, issue: KnownIssue) -> ShownIn:
        """Find the torch versions in which a known issue's script shows the issue."""
        return self._result(Method.SCRIPT, self._measure(of_issue(issue).run), ())

    def of_finding(self, finding: Finding) -> ShownIn:
        """Find the torch versions in which a finding shows.

        The finding's script runs on the measured versions. It must show the finding on the version on which the finding was
        found. If `versions` lacks this version, it must show the finding on the oldest or newest one. Otherwise, each measured
        version checks the finding's case again.
        """
        found_in = Version(Version(finding.environment.torch).public)
        first = (found_in,) if found_in in self.versions else ()
        script = self._script(finding)
        if script is not None:
            measure = self._measure(script.run)
            if _shows_in(measure, first or (self.versions[0], self.versions[-1])):
                return self._result(Method.SCRIPT, measure, first)
            self.environments.tell("no version shows it by script, so the finding is replayed")
        return self._result(Method.REPLAY, self._measure(lambda *where: _replayed(finding, *where)), first)

    def _script(self, finding: Finding) -> Script | None:
        try:
            return of_finding(finding)
        except Exception as error:
            self.environments.tell(f"{failure_line('writing a script', error)}; the finding is replayed")
            return None

    def _result(self, by: Method, measure: Measure, first: Sequence[Version]) -> ShownIn:
        measured = bisect_versions(self.versions, measure, self.versions if self.every else first)
        return ShownIn(by=by, versions=tuple(map(str, self.versions)), measured=measured)

    def _measure(self, attempt: Try) -> Measure:
        """Measure a version once, and report progress."""

        @cache
        def measure(version: Version) -> Showing:
            try:
                installation = self.environments.installation(version)
                self.environments.tell(f"torch {version}: running ...")
                found = attempt(installation, self.seconds)
            except NoEnvironment as error:
                found = Showing(shows=Shows.CANNOT_RUN, reason=str(error))
            self.environments.tell(f"torch {version}: {found}")
            return found

        return measure


def _shows_in(measure: Measure, versions: Sequence[Version]) -> bool:
    return any(measure(version).shows is Shows.SHOWS for version in versions)


def _replayed(finding: Finding, installation: Installation, seconds: float) -> Showing:
    command = ("-m", "equivcheck", "replay", str(finding.path.absolute()), "--json")
    ran = run_python(installation.python, command, seconds=seconds)
    if ran.code is None:
        return Showing(shows=Shows.CANNOT_RUN, reason=f"did not finish within {seconds:.0f} s")
    if ran.code not in (0, 1):
        return Showing(shows=Shows.CANNOT_RUN, reason=ran.last_line)
    values = json.loads(ran.printed)["verdict"]
    del values["fingerprint"]
    verdict = verdict_from(values, finding.verdict.case, where=f"replay on torch {installation.torch}")
    return showing_of_recheck(finding.verdict, verdict)
