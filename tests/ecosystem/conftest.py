"""Trainings of real libraries, checked: run by ``tox run -e ecosystem``, as the libraries are in no other environment.

What each check came to, and the processor time that it took, is printed after the tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from equivcheck import check_training
from equivcheck.user.verdict import UserVerdict

CHECKS: list[tuple[str, str, str, float]] = []
"""Library, layout, outcome and seconds of each check."""


def pytest_configure(config: pytest.Config) -> None:
    """What these libraries warn of is theirs."""
    config.addinivalue_line("filterwarnings", "default")
    if "LOCAL_RANK" in os.environ:
        # Lightning Fabric runs this command again for each further rank, and nobody needs these: ranks are equivcheck's.
        pytest.exit("a process that Lightning Fabric started", returncode=0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table of the checks."""
    terminalreporter.section("checks, with seconds of processor time")
    for library, layout, outcome, seconds in CHECKS:
        terminalreporter.write_line(f"{library:16} {layout:56} {outcome:12} {seconds:6.1f}")


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> Callable[..., UserVerdict]:
    """`check_training`, timed."""

    def timed(layout: str, **training: Any) -> UserVerdict:
        library = request.path.stem.removeprefix("test_")
        started = _processor_seconds()
        verdict = check_training(**training)
        CHECKS.append((library, layout, verdict.outcome.value, _processor_seconds() - started))
        return verdict

    return timed


def _processor_seconds() -> float:
    """Of this process and of the ranks that it has started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(each.user + each.system for each in times)
