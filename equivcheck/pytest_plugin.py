"""The pytest face: Hypothesis profiles, and a summary of the scenarios checked by layout and outcome.

It costs a run that checks nothing nothing: neither torch nor Hypothesis is imported here.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator

import pytest

from equivcheck.system.tally import Row, take

PROPERTY = "equivcheck"
"""The user property that carries a test's counts from the process that ran it to the one that sums up, and into JUnit files."""


class ScenarioSummary:
    """Adds up what tests checked, wherever they ran, and prints it at the end."""

    def __init__(self) -> None:
        self.checked: Counter[Row] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the counts of one test."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.checked.update({(layout, world, outcome): count for layout, world, outcome, count in json.loads(str(value))})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a table, if anything was checked."""
        if self.checked:
            terminalreporter.section(f"equivcheck: {self.checked.total()} scenarios")
            for line in table(self.checked):
                terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start counting; register the profiles if one is asked for, before Hypothesis's plugin loads it."""
    config.pluginmanager.register(ScenarioSummary(), "equivcheck-summary")
    if str(config.getoption("--hypothesis-profile", None)).startswith("equivcheck-"):
        from equivcheck.system.profiles import register_profiles

        register_profiles()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Attach to each test what it has checked, passed or failed."""
    try:
        return (yield)
    finally:
        checked = take()
        if checked:
            item.user_properties.append((PROPERTY, json.dumps([[*row, count] for row, count in sorted(checked.items())])))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Close the worlds that checks have opened, if any."""
    pool = sys.modules.get("equivcheck.worlds.pool")
    if pool is not None:
        pool.close_worlds()


def table(checked: Counter[Row]) -> list[str]:
    """A row for each layout in each world with a column for each outcome that occurred, then the share of what is equivalent."""
    outcomes = sorted({outcome for _, _, outcome in checked}, key=lambda outcome: (outcome != "equivalent", outcome))
    places = sorted({(layout, world) for layout, world, _ in checked})
    rows = [["layout", "world", *outcomes]]
    rows += [[*place, *(str(checked[(*place, outcome)]) for outcome in outcomes)] for place in places]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    clear, total = sum(count for (_, _, outcome), count in checked.items() if outcome == "equivalent"), checked.total()
    share = f"clearly equivalent: {clear} of {total} ({clear / total:.0%})"
    return [*("  ".join(map(_aligned, range(len(row)), row, widths)) for row in rows), share]


def _aligned(column: int, cell: str, width: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)
