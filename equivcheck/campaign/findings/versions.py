"""Torch versions that show a finding, searched by bisection. They are stored in versions.json in the finding's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from packaging.version import Version

from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.system.choice import PrintableEnum


class Method(PrintableEnum):
    """How a torch version was tested for a finding."""

    SCRIPT = "script"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionAnswer:
    """Whether a finding's case still fails in one torch version."""

    torch: str
    """Torch version."""
    showing: Showing
    """Whether the finding shows in this version, or why this cannot be tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownIn:
    """Torch versions that show a finding, searched by bisection."""

    by: Method
    """How the versions were tested."""
    versions: tuple[str, ...]
    """All versions between which the bisection searched, oldest first."""
    measured: tuple[VersionAnswer, ...]
    """Versions that were tested, with their answers, oldest first."""

    def __str__(self) -> str:
        """Versions in words: ``begins in 2.11.0, still shows in 2.15.0``.

        Each range names its ends, and says whether they are certain.
        """
        runs = list(self._runs())
        if not runs:
            return "shows in no measured version" if self.could_run else "cannot run in any measured version"
        return "; ".join(f"{self._beginning(first)}, {self._end(last)}" for first, last in runs)

    @property
    def shows(self) -> bool:
        """Whether the finding shows in any tested version."""
        return any(found.showing.shows is Shows.SHOWS for found in self.measured)

    @property
    def skipped_versions(self) -> tuple[str, ...]:
        """Versions not tested, because the tested versions before and after them agree."""
        there = {found.torch for found in self.measured}
        return tuple(version for version in self.versions if version not in there)

    @property
    def specifiers(self) -> tuple[str, ...]:
        """PEP 440 specifiers for the versions that show the finding. Versions without a clear answer are left out."""
        return tuple(self._specifier(first, last) for first, last in self._runs())

    @property
    def could_run(self) -> bool:
        """Whether the case could run in any tested version."""
        return any(found.showing.shows is not Shows.CANNOT_RUN for found in self.measured)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """First and last index in `measured` for each range in which the finding shows."""
        for shows, run in groupby(range(len(self.measured)), key=lambda place: self.measured[place].showing.shows):
            places = list(run)
            if shows is Shows.SHOWS:
                yield places[0], places[-1]

    def _beginning(self, place: int) -> str:
        version = self.measured[place].torch
        if place == 0:
            return f"shows in {version}, the oldest measured"
        before = self.measured[place - 1]
        unsure = f" or earlier ({before.torch} cannot run it)" if before.showing.shows is Shows.CANNOT_RUN else ""
        return f"begins in {version}{unsure}"

    def _end(self, place: int) -> str:
        version = self.measured[place].torch
        if place == len(self.measured) - 1:
            return f"still shows in {version}"
        after = self.measured[place + 1]
        if after.showing.shows is Shows.CANNOT_RUN:
            return f"last shows in {version} ({after.torch} cannot run it)"
        return f"fixed in {after.torch}"

    def _specifier(self, first: int, last: int) -> str:
        bounds = [f">={self._bound(first)}"]
        if last + 1 < len(self.measured):
            bounds.append(f"<{self._bound(last + 1)}")
        return ",".join(bounds)

    def _bound(self, place: int) -> str:
        """Return the minor version, or the patch version if an older patch release with another answer was measured."""
        release = Version(self.measured[place].torch).release
        if place and Version(self.measured[place - 1].torch).release[:2] == release[:2]:
            return self.measured[place].torch
        return f"{release[0]}.{release[1]}"
