"""Sets of feature pairs, and the shipped table with the legal ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from equivcheck.campaign.coverage.features import Feature

TABLE = "legal_pairs.json"
"""Table of legal pairs, made by `equivcheck coverage --legal` at each release."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pairs as a symmetric bit matrix: bit j in row i says if features i and j form a pair."""

    features: tuple[Feature, ...]
    """Features, numbered by their position."""
    rows: tuple[int, ...]
    """One row per feature."""

    @property
    def count(self) -> int:
        """Number of pairs. A feature is no pair with itself."""
        return sum(row.bit_count() for row in self.rows) // 2

    def of(self, feature: int) -> Iterator[int]:
        """Yield a feature's partners, by number."""
        row = self.rows[feature]
        return (other for other in range(len(self.features)) if row >> other & 1)


def pairs_of(features: Iterable[Feature], pairs: Iterable[tuple[Feature, Feature]]) -> Pairs:
    """Build a set from feature pairs."""
    order = tuple(sorted(features))
    numbers = {feature: number for number, feature in enumerate(order)}
    rows = [0] * len(order)
    for one, other in pairs:
        rows[numbers[one]] |= 1 << numbers[other]
        rows[numbers[other]] |= 1 << numbers[one]
    return Pairs(order, tuple(rows))


@cache
def legal_pairs() -> Pairs:
    """Pairs of shipped features that one scenario can have."""
    table = json.loads(files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))
    return Pairs(tuple(Feature(*names) for names in table["features"]), tuple(int(row, 16) for row in table["pairs"]))


def table_of(pairs: Pairs) -> str:
    """Format a set of pairs as the table that `legal_pairs` reads."""
    rows = [[feature.part, feature.noun, feature.field, feature.value] for feature in pairs.features]
    lines = ",\n".join(json.dumps(row) for row in rows), ",\n".join(json.dumps(f"{row:x}") for row in pairs.rows)
    return '{{\n"features": [\n{}\n],\n"pairs": [\n{}\n]\n}}\n'.format(*lines)
