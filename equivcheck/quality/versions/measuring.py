"""Search for the torch versions in which a finding or known issue shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from packaging.version import Version

from equivcheck.campaign.findings.again import shows_again
from equivcheck.campaign.findings.finding import Finding, verdict_from
from equivcheck.campaign.findings.versions import Method, ShownIn
from equivcheck.oracle.known_issues.known import KnownIssue
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.description import failed
from equivcheck.quality.versions.bisection import Measure, bisected
from equivcheck.quality.versions.environments import Environments, Installation, NoEnvironment
from equivcheck.quality.versions.process import run_python
from equivcheck.quality.versions.scripts import Script, of_finding, of_issue

Try = Callable[[Installation, float], Showing]
"""Returns whether something shows on an installation, within a limit in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Versions to search, and how."""

    versions: tuple[Version, ...]
    """Versions, oldest first."""
    environments: Environments
    """Gives the installations."""
    seconds: float
    """Limit per version."""
    every: bool = False
    """Whether to measure all versions instead of bisecting."""

    def of_issue(self, issue: KnownIssue) -> ShownIn:
        """Find the versions in which a known issue's script shows it."""
        return self._result(Method.SCRIPT, self._measure(of_issue(issue).run), ())

    def of_finding(self, finding: Finding) -> ShownIn:
        """Find the versions in which a finding shows. A replay decides if no script shows it."""
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
            self.environments.tell(f"{failed('writing a script', error)}; the finding is replayed")
            return None

    def _result(self, by: Method, measure: Measure, first: Sequence[Version]) -> ShownIn:
        measured = bisected(self.versions, measure, self.versions if self.every else first)
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
        return Showing(shows=Shows.CANNOT_RUN, reason=f"was not done after {seconds:.0f} s")
    if ran.code not in (0, 1):
        return Showing(shows=Shows.CANNOT_RUN, reason=ran.last_line)
    values = json.loads(ran.printed)["verdict"]
    del values["fingerprint"]
    verdict = verdict_from(values, finding.verdict.case, where=f"replay on torch {installation.torch}")
    return shows_again(finding.verdict, verdict)
