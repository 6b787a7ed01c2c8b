"""Measured results from the known issues' scripts on each torch version, stored in shows.toml."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from packaging.version import Version

from equivcheck.system.choice import PrintableEnum

_WRONG_NUMBER = r"max difference (nan|[1-9]|0\.0*[1-9])"
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Failure|Interrupt)\b.*", re.MULTILINE)
_PEER_LEFT = re.compile(r"Connection (closed|reset) by peer")
_REASON = 110
"""Maximum characters of a reason."""
_HEAD = """\
# For each known issue: whether its script shows it, by version of torch. Measured: `equivcheck versions --write-shows`.
"""


class Shows(PrintableEnum):
    """Whether the script for a known issue shows the issue on one torch version."""

    SHOWS = "shows"
    DOES_NOT = "does not"
    CANNOT_RUN = "cannot run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """Whether the script for a known issue shows the issue on one torch version, with a reason if it cannot run."""

    shows: Shows
    """Whether the script shows the issue."""
    reason: str = ""
    """Why the script cannot run, at most 110 characters. Empty if it ran."""

    def __str__(self) -> str:
        return f"{self.shows.value}: {self.reason}" if self.reason else self.shows.value

    def agrees(self, *, is_in_range: bool) -> bool:
        """Whether the result fits the issue's version range.

        Inside the range (`is_in_range`), the script must show the issue; outside, it must not show it.
        """
        return (self.shows is Shows.SHOWS) == is_in_range


Table = dict[str, dict[str, Showing]]
"""Results by issue id, then by version of torch."""


def showing(error: str, code: int, printed: str) -> Showing:
    """Decide from exit code and output whether a script shows its known issue.

    The script shows the issue if it exits with 1, and prints the issue's error or a difference. `error` is a regular expression
    for the error. It is empty for an issue that gives wrong numbers.
    """
    return judge_output(code, printed, has_evidence=re.search(error or _WRONG_NUMBER, printed) is not None)


def judge_output(code: int, printed: str, *, has_evidence: bool) -> Showing:
    """Decide from a script's exit code whether it shows its known issue.

    `has_evidence` says whether the script printed the expected error or difference. Exit code 1 without evidence means that the
    script cannot run.
    """
    if code == 1 and has_evidence:
        return Showing(shows=Shows.SHOWS)
    if code == 0:
        return Showing(shows=Shows.DOES_NOT)
    return Showing(shows=Shows.CANNOT_RUN, reason=_reason(printed) or f"exit code {code}")


def _reason(printed: str) -> str:
    # Ranks whose peers have left raise as well, but the cause is the error of the rank that left.
    errors = _RAISED.findall(printed)
    lines = [error for error in errors if not _PEER_LEFT.search(error)] or errors or printed.strip().splitlines()[-1:]
    return lines[0][:_REASON].strip() if lines else ""


def read_table(text: str) -> Table:
    """Parse a text in the format of shows.toml."""
    return {issue: {version: _parsed(cell) for version, cell in row.items()} for issue, row in tomllib.loads(text).items()}


def written_table(table: Mapping[str, Mapping[str, Showing]]) -> str:
    """Return the results as a text in the format of shows.toml: one line for each issue, versions from oldest to newest."""
    lines = []
    for issue, row in sorted(table.items()):
        cells = (f"{json.dumps(version)} = {json.dumps(str(row[version]))}" for version in sorted(row, key=Version))
        lines.append(f"{issue} = {{ {', '.join(cells)} }}\n")
    return _HEAD + "\n" + "".join(lines)


@cache
def measured_results() -> Table:
    """Return the results stored in shows.toml, by issue and torch version."""
    return read_table(files("equivcheck.oracle.known_issues").joinpath("shows.toml").read_text("utf-8"))


def version_range(row: Mapping[str, Showing]) -> str:
    """Return a PEP 440 specifier for the torch versions that show an issue.

    Versions newer than all measured ones are treated like the newest measured one. If nothing was measured, the specifier is
    empty and allows every version.
    """
    minors = [".".join(version.split(".")[:2]) for version in sorted(row, key=Version)]
    shows = [row[version].shows is Shows.SHOWS for version in sorted(row, key=Version)]
    if not any(shows):
        return "<0" if row else ""
    first, last = shows.index(True), len(shows) - 1 - shows[::-1].index(True)
    gaps = [f"!={minor}.*" for minor, shown in zip(minors[first:last], shows[first:last], strict=True) if not shown]
    return ",".join([f">={minors[first]}", *gaps, *(f"<{minor}" for minor in minors[last + 1 : last + 2])])


def table_path() -> Path:
    """Return the path of shows.toml."""
    return Path(str(files("equivcheck.oracle.known_issues").joinpath("shows.toml")))


def _parsed(cell: str) -> Showing:
    shows, _, reason = cell.partition(": ")
    return Showing(shows=Shows(shows), reason=reason)
