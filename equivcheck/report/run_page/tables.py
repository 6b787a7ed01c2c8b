"""Table rows for a run's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from equivcheck.campaign.history.past import Noted
from equivcheck.oracle.verdict.verdict import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """Check results and cost for a layout."""

    name: str
    """Layout name."""
    outcomes: Mapping[Outcome, int]
    """All outcomes with their check counts."""
    seconds: float
    """Seconds for all its checks."""
    share: float
    """Share of all layouts' seconds, 0 to 1."""
    median_ms: float | None
    """Median milliseconds per check; None if unknown."""
    p95_ms: float | None
    """Milliseconds that 95 % of the checks do not exceed; None if unknown."""

    @property
    def checks(self) -> int:
        """Check count."""
        return sum(self.outcomes.values())

    @property
    def words(self) -> str:
        """``9 equivalent, 1 known``."""
        return ", ".join(f"{number:,} {outcome.value}" for outcome, number in self.outcomes.items() if number)

    @property
    def stack(self) -> Iterator[tuple[Outcome, float, float]]:
        """Outcomes with start and width in a bar with length 100."""
        begin = 0.0
        for outcome, number in self.outcomes.items():
            if number:
                width = 100 * number / self.checks
                yield outcome, round(begin, 2), round(width, 2)
                begin += width


def layout_rows(noted: Noted) -> list[LayoutRow]:
    """A row per layout, by name."""
    told = noted.summary["layouts"] if noted.summary else {}
    total = sum(noted.costs.values()) or 1.0
    names = sorted({*noted.costs, *(layout for layout, _ in noted.outcomes)})
    return [
        LayoutRow(
            name=name,
            outcomes={outcome: noted.outcomes.get((name, outcome), 0) for outcome in Outcome},
            seconds=noted.costs.get(name, 0.0),
            share=noted.costs.get(name, 0.0) / total,
            median_ms=told[name]["median_ms"] if name in told else None,
            p95_ms=told[name]["p95_ms"] if name in told else None,
        )
        for name in names
    ]


def all_layouts(rows: Sequence[LayoutRow]) -> LayoutRow:
    """Sum over all rows."""
    return LayoutRow(
        name="all",
        outcomes={outcome: sum(row.outcomes[outcome] for row in rows) for outcome in Outcome},
        seconds=sum(row.seconds for row in rows),
        share=1.0,
        median_ms=None,
        p95_ms=None,
    )
