"""Sets of pairs of features, and the legal ones, as they are shipped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from equivcheck.campaign.coverage.features import Feature

TABLE = "legal_pairs.json"
"""The legal pairs beside this module: found by `equivcheck coverage --legal`, from the strategies and limits of that day."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pairs of numbered features: bit j of row i tells whether features i and j go together, and is as bit i of row j."""

    features: tuple[Feature, ...]
    """In the order of their numbers."""
    rows: tuple[int, ...]
    """One a feature."""

    @property
    def count(self) -> int:
        """How many pairs there are; a feature with itself is none."""
        return sum(row.bit_count() for row in self.rows) // 2

    def of(self, feature: int) -> Iterator[int]:
        """The features that go with one."""
        row = self.rows[feature]
        return (other for other in range(len(self.features)) if row >> other & 1)


def pairs_of(features: Iterable[Feature], pairs: Iterable[tuple[Feature, Feature]]) -> Pairs:
    """The set of some pairs of some features."""
    order = tuple(sorted(features))
    numbers = {feature: number for number, feature in enumerate(order)}
    rows = [0] * len(order)
    for one, other in pairs:
        rows[numbers[one]] |= 1 << numbers[other]
        rows[numbers[other]] |= 1 << numbers[one]
    return Pairs(order, tuple(rows))


@cache
def legal_pairs() -> Pairs:
    """The pairs that can occur together, of the features of the nouns that ship."""
    table = json.loads(files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))
    return Pairs(tuple(Feature(*names) for names in table["features"]), tuple(int(row, 16) for row in table["pairs"]))


def table_of(pairs: Pairs) -> str:
    """A set of pairs as text that `legal_pairs` reads."""
    rows = [[feature.part, feature.noun, feature.field, feature.value] for feature in pairs.features]
    lines = ",\n".join(json.dumps(row) for row in rows), ",\n".join(json.dumps(f"{row:x}") for row in pairs.rows)
    return '{{\n"features": [\n{}\n],\n"pairs": [\n{}\n]\n}}\n'.format(*lines)
