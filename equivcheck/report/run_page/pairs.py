"""Feature pairs by part of the scenario, for a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCell:
    """Pairs between features in two parts of a scenario."""

    missing: int
    """Legal pairs not drawn."""
    legal: int
    """Legal pairs; 0 if the parts have none."""

    @property
    def percent(self) -> int:
        """Missing percentage. It is 0 or 100 only if none or all are missing."""
        exact = 100 * self.missing / self.legal
        return round(exact) if exact in {0, 100} else min(99, max(1, round(exact)))


def pair_rows(parts: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[PairCell]]]:
    """Lower triangle: each part with cells for the parts up to itself."""
    cells = {frozenset((part["one"], part["other"])): part for part in parts}
    names = sorted({part["one"] for part in parts} | {part["other"] for part in parts})
    return [
        (name, [_cell(cells[frozenset((name, other))]) for other in names[: number + 1]]) for number, name in enumerate(names)
    ]


def _cell(part: Mapping[str, Any]) -> PairCell:
    return PairCell(missing=part["legal"] - part["drawn"], legal=part["legal"])
