"""Whether the script of a known issue shows it, and the table of the versions of torch on which each was seen to, or not to."""

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

from equivcheck.oracle.known_issues.known import Kind, KnownIssue
from equivcheck.system.choice import Choice

_WRONG_NUMBER = r"max difference (nan|[1-9]|0\.0*[1-9])"
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Failure|Interrupt)\b.*", re.MULTILINE)
_PEER_LEFT = re.compile(r"Connection (closed|reset) by peer")
_REASON = 110
"""Characters of a reason that are kept."""
_HEAD = """\
# For each known issue: whether its script shows it, by version of torch. Measured: `equivcheck versions --write-shows`.
"""


class Shows(Choice):
    """What the script of a known issue did on a version of torch."""

    SHOWS = "shows"
    DOES_NOT = "does not"
    CANNOT_RUN = "cannot run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """Whether a known issue shows on a version of torch."""

    shows: Shows
    """What its script did."""
    reason: str = ""
    """Of one that cannot run: why, in short."""

    def __str__(self) -> str:
        return f"{self.shows.value}: {self.reason}" if self.reason else self.shows.value

    def agrees(self, issue: KnownIssue, version: str) -> bool:
        """Whether the versions that an issue is on file for have this one if it shows there, and only then."""
        return (self.shows is Shows.SHOWS) == issue.is_in(version)


Table = dict[str, dict[str, Showing]]
"""By the id of an issue, then by the version of torch."""


def showing(issue: KnownIssue, code: int, printed: str) -> Showing:
    """What a script did: one that shows its issue exits with 1, and prints a wrong number, or the error on file."""
    evidence = _WRONG_NUMBER if issue.kind is Kind.WRONG_NUMBERS else issue.error
    return judged(code, printed, has_evidence=re.search(evidence, printed) is not None)


def judged(code: int, printed: str, *, has_evidence: bool) -> Showing:
    """What a script did that is to exit with 1, and print its evidence, where something shows."""
    if code == 1 and has_evidence:
        return Showing(shows=Shows.SHOWS)
    if code == 0:
        return Showing(shows=Shows.DOES_NOT)
    return Showing(shows=Shows.CANNOT_RUN, reason=_reason(printed) or f"exit code {code}")


def _reason(printed: str) -> str:
    """The first error, but for those of ranks whose peers had left; else the last line."""
    errors = _RAISED.findall(printed)
    lines = [error for error in errors if not _PEER_LEFT.search(error)] or errors or printed.strip().splitlines()[-1:]
    return lines[0][:_REASON].strip() if lines else ""


def read_table(text: str) -> Table:
    """The table that a file such as shows.toml has."""
    return {issue: {version: _parsed(cell) for version, cell in row.items()} for issue, row in tomllib.loads(text).items()}


def written_table(table: Mapping[str, Mapping[str, Showing]]) -> str:
    """The text of a file such as shows.toml: a line an issue, versions from the oldest to the newest."""
    return _HEAD + "\n" + "".join(f"{issue} = {{ {_row(table[issue])} }}\n" for issue in sorted(table))


@cache
def measured() -> Table:
    """The table on file."""
    return read_table(files("equivcheck.oracle.known_issues").joinpath("shows.toml").read_text("utf-8"))


def table_path() -> Path:
    """Where the table is."""
    return Path(str(files("equivcheck.oracle.known_issues").joinpath("shows.toml")))


def _parsed(cell: str) -> Showing:
    shows, _, reason = cell.partition(": ")
    return Showing(shows=Shows(shows), reason=reason)


def _row(row: Mapping[str, Showing]) -> str:
    return ", ".join(f"{json.dumps(version)} = {json.dumps(str(row[version]))}" for version in sorted(row, key=Version))
