"""Table rows for the page about a campaign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equivcheck.campaign.history.past import Noted
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.report.frame.charts import stack_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """Results and cost for one layout's checks."""

    name: str
    """Layout name."""
    outcomes: Mapping[Outcome, int]
    """How many checks ended with each outcome."""
    seconds: float
    """Seconds spent on checks with this layout."""
    share: float
    """Share of the seconds spent on all layouts, from 0 to 1."""
    median_ms: float | None
    """Median milliseconds for a check; None if unknown."""
    p95_ms: float | None
    """Milliseconds within which 95 % of the checks ended; None if unknown."""

    @property
    def checks(self) -> int:
        """How many checks this layout had."""
        return sum(self.outcomes.values())

    @property
    def words(self) -> str:
        """How many checks ended with each outcome, as text: ``9 equivalent, 1 known``."""
        return ", ".join(f"{number:,} {outcome.value}" for outcome, number in self.outcomes.items() if number)

    @property
    def stack(self) -> tuple[tuple[str, float, float], ...]:
        """Parts of a stacked bar with one part for each outcome: its name, start and width in percent."""
        return stack_parts({outcome.value: number for outcome, number in self.outcomes.items()}, self.checks)


def layout_rows(noted: Noted) -> list[LayoutRow]:
    """Return results and cost for each layout, sorted by name."""
    figures = noted.summary["layouts"] if noted.summary else {}
    total = sum(noted.costs.values()) or 1.0
    names = sorted({*noted.costs, *(layout for layout, _ in noted.outcomes)})
    return [
        LayoutRow(
            name=name,
            outcomes={outcome: noted.outcomes.get((name, outcome), 0) for outcome in Outcome},
            seconds=noted.costs.get(name, 0.0),
            share=noted.costs.get(name, 0.0) / total,
            median_ms=figures[name]["median_ms"] if name in figures else None,
            p95_ms=figures[name]["p95_ms"] if name in figures else None,
        )
        for name in names
    ]


def all_layouts(rows: Sequence[LayoutRow]) -> LayoutRow:
    """Return one row for all layouts together."""
    return LayoutRow(
        name="all",
        outcomes={outcome: sum(row.outcomes[outcome] for row in rows) for outcome in Outcome},
        seconds=sum(row.seconds for row in rows),
        share=1.0,
        median_ms=None,
        p95_ms=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCell:
    """Table cell for two parts of a scenario, such as model and optimizer: how many possible feature pairs no scenario had."""

    missing: int
    """How many possible pairs no scenario had."""
    legal: int
    """How many pairs are possible; 0 if the parts have none."""

    @property
    def percent(self) -> int:
        """Percentage of the possible pairs that no scenario had, rounded.

        It is 0 only if no pair is missing, and 100 only if all are.
        """
        exact = 100 * self.missing / self.legal
        return round(exact) if exact in {0, 100} else min(99, max(1, round(exact)))


def pair_rows(parts: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[PairCell]]]:
    """Return the rows of a table with missing feature pairs.

    It is triangular, because each two parts of a scenario share one cell.
    """
    cells = {frozenset((part["one"], part["other"])): part for part in parts}
    names = sorted({part["one"] for part in parts} | {part["other"] for part in parts})
    return [
        (name, [_cell(cells[frozenset((name, other))]) for other in names[: number + 1]]) for number, name in enumerate(names)
    ]


def _cell(part: Mapping[str, Any]) -> PairCell:
    return PairCell(missing=part["legal"] - part["drawn"], legal=part["legal"])
