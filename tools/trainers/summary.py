"""Numbers of right configurations, false alarms and mistakes found, for each framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivcheck import Outcome
from tools.trainers.rows import Result

ALARMS = {Outcome.DIVERGED.value, Outcome.CRASHED.value, Outcome.HUNG.value}
COLUMNS = ("right", "false alarms", "mistakes", "found", "cannot run", "seconds")


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Lines of a table with a row for each framework, and one for all."""
    yield "".join((f"{'framework':16}", *(f"{name:>14}" for name in COLUMNS)))
    for name in dict.fromkeys(result.framework for result in results):
        yield _line(name, [result for result in results if result.framework == name])
    yield _line("all", results)


def _line(name: str, results: Sequence[Result]) -> str:
    right = [result for result in results if result.expected == Outcome.EQUIVALENT.value]
    wrong = [result for result in results if result.expected == Outcome.DIVERGED.value]
    counts = (
        len(right),
        sum(result.outcome in ALARMS for result in right),
        len(wrong),
        sum(result.is_expected for result in wrong),
        len(results) - len(right) - len(wrong),
        round(sum(result.seconds for result in results)),
    )
    return "".join((f"{name:16}", *(f"{count:14}" for count in counts)))
