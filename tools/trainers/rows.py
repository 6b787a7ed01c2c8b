"""Rows of the matrix of versions, and their results."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from equivcheck import Outcome, UsageError
from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.oracle.verdict.sentences import place
from equivcheck.user.verdict import UserVerdict

REFUSED: Literal["refused"] = "refused"
"""Outcome of a configuration that the adapter or the framework refuses with one line."""
NOT_RUN = "not run"
"""Outcome of a row whose process ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration of one version."""

    version: str
    """Key in `Framework.versions`."""
    configuration: str
    """The configuration in a few words."""
    check: Callable[[], UserVerdict]
    """Checks the configuration with the framework that can be imported."""
    expected: Outcome | Literal["refused"] = Outcome.EQUIVALENT
    """Expected outcome."""
    cause: str = ""
    """Text that the verdict's cause or first difference contains, or a refusal's line."""
    report: str = ""
    """Public report about a mistake in the framework, such as ``#7718``, or ``none``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework in several versions."""

    name: str
    """Name in the table."""
    versions: Mapping[str, tuple[str, ...]]
    """Packages that pip installs into a folder for each version, without dependencies. Empty if the environment has them."""
    rows: tuple[Row, ...]
    """Configurations to check."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for pip and for checks."""

    def rows_of(self, version: str, only: str = "") -> tuple[Row, ...]:
        """Return a version's rows whose configuration contains `only`."""
        return tuple(row for row in self.rows if row.version == version and only in row.configuration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome of a row."""

    framework: str
    """Framework's name."""
    version: str
    """Framework's version."""
    configuration: str
    """The row's configuration."""
    expected: str
    """Expected outcome's value, or `REFUSED`."""
    outcome: str
    """Outcome's value, `REFUSED` or `NOT_RUN`."""
    cause: str
    """Cause, or the first difference if none is known; a refusal's line. Empty if ranks agree with one device."""
    report: str
    """Public report."""
    seconds: float
    """Duration of the check, and of the search for a cause if the row does not expect a first difference."""
    is_expected: bool
    """Whether outcome and cause are as expected."""


def run_rows(framework: Framework, version: str, only: str = "") -> Iterator[Result]:
    """Check a version's rows in this process. An exception other than `UsageError` ends its row as ``not run``."""
    for row in framework.rows_of(version, only):
        started = time.perf_counter()
        try:
            outcome, cause = _outcome_and_cause(row.check(), row.cause)
        except UsageError as error:
            outcome, cause = REFUSED, str(error)
        except Exception as error:
            outcome, cause = NOT_RUN, shorten_to_line(f"{type(error).__name__}: {error}")
        yield result_of(framework, row, outcome, cause, time.perf_counter() - started)


def result_of(framework: Framework, row: Row, outcome: str, cause: str, seconds: float) -> Result:
    """Compare a row's outcome and cause with the expected ones."""
    expected = str(getattr(row.expected, "value", row.expected))
    return Result(
        framework=framework.name,
        version=row.version,
        configuration=row.configuration,
        expected=expected,
        outcome=outcome,
        cause=cause,
        report=row.report,
        seconds=seconds,
        is_expected=outcome == expected and row.cause in cause,
    )


def _outcome_and_cause(verdict: UserVerdict, expected_cause: str) -> tuple[str, str]:
    if verdict.outcome is Outcome.EQUIVALENT:
        unread = ", ".join(verdict.unread)
        return (NOT_RUN, f"no rank recorded {unread}") if unread else (verdict.outcome.value, "")
    first = "" if verdict.divergence is None else place(verdict.divergence)
    if expected_cause and expected_cause in first:  # the search for a cause takes ten times as long as a check
        return verdict.outcome.value, first
    return verdict.outcome.value, verdict.cause or verdict.hint or first or _without_folder(shorten_to_line(verdict.reason))


def _without_folder(text: str) -> str:
    """Replace temporary folders, because their names are random and the table compares runs."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "FOLDER", text)
