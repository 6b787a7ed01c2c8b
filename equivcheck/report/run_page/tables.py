"""Table rows for a run's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equivcheck.campaign.history.past import Noted
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.report.frame.charts import stack_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """Results and cost for a layout."""

    name: str
    """Layout name."""
    outcomes: Mapping[Outcome, int]
    """All outcomes with their check counts."""
    seconds: float
    """Seconds for all checks of the layout."""
    share: float
    """Share of the seconds for all layouts, 0 to 1."""
    median_ms: float | None
    """Median milliseconds per check; None if unknown."""
    p95_ms: float | None
    """Milliseconds that 95 % of the checks do not exceed; None if unknown."""

    @property
    def checks(self) -> int:
        """Number of checks."""
        return sum(self.outcomes.values())

    @property
    def words(self) -> str:
        """Counts by outcome: ``9 equivalent, 1 known``."""
        return ", ".join(f"{number:,} {outcome.value}" for outcome, number in self.outcomes.items() if number)

    @property
    def stack(self) -> tuple[tuple[str, float, float], ...]:
        """Outcomes with start and width in a bar with length 100."""
        return stack_parts({outcome.value: number for outcome, number in self.outcomes.items()}, self.checks)


def layout_rows(noted: Noted) -> list[LayoutRow]:
    """Return a row per layout, by name."""
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
    """Return the sum over all rows."""
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
    """Feature pairs between two parts of a scenario."""

    missing: int
    """Number of allowed pairs that were not drawn."""
    legal: int
    """Number of allowed pairs; 0 if the parts have none."""

    @property
    def percent(self) -> int:
        """Missing percentage. It is 0 or 100 only if none or all pairs are missing."""
        exact = 100 * self.missing / self.legal
        return round(exact) if exact in {0, 100} else min(99, max(1, round(exact)))


def pair_rows(parts: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[PairCell]]]:
    """Return the lower triangle of a table: for each part, cells for the parts up to itself."""
    cells = {frozenset((part["one"], part["other"])): part for part in parts}
    names = sorted({part["one"] for part in parts} | {part["other"] for part in parts})
    return [
        (name, [_cell(cells[frozenset((name, other))]) for other in names[: number + 1]]) for number, name in enumerate(names)
    ]


def _cell(part: Mapping[str, Any]) -> PairCell:
    return PairCell(missing=part["legal"] - part["drawn"], legal=part["legal"])
