"""pytest plugin: it registers Hypothesis profiles and prints how many scenarios each layout passed.

pytest loads this module in every run, so it imports neither torch nor Hypothesis.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator

import pytest

from equivcheck.system.tally import TallyRow, take_counts

PROPERTY = "equivcheck"
"""Name of the test report property with the counts. pytest-xdist workers and JUnit files keep it."""


class ScenarioSummary:
    """Counts the checks in all tests by layout, world and outcome, and prints the counts when pytest ends."""

    def __init__(self) -> None:
        self.checked: Counter[TallyRow] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the counts of checks in one test, from the test's report."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.checked.update({(layout, world, outcome): count for layout, world, outcome, count in json.loads(str(value))})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table if any test checked a scenario."""
        if self.checked:
            terminalreporter.section(f"equivcheck: {self.checked.total()} scenarios")
            for line in table(self.checked):
                terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the summary, and the Hypothesis profiles if `--hypothesis-profile` names one.

    It runs first because Hypothesis's own plugin loads the profile in the same hook.
    """
    config.pluginmanager.register(ScenarioSummary(), "equivcheck-summary")
    if str(config.getoption("--hypothesis-profile", None)).startswith("equivcheck-"):
        from equivcheck.system.profiles import register_profiles

        register_profiles()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Attach a test's counts of checks to its report, even if the test fails."""
    try:
        return (yield)
    finally:
        checked = take_counts()
        if checked:
            item.user_properties.append((PROPERTY, json.dumps([[*row, count] for row, count in sorted(checked.items())])))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Close the worlds that checks opened."""
    pool = sys.modules.get("equivcheck.worlds.pool")
    if pool is not None:
        pool.close_worlds()


def table(checked: Counter[TallyRow]) -> list[str]:
    """Return a line for each layout and world, with a column for each outcome, then the share of equivalent scenarios."""
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
