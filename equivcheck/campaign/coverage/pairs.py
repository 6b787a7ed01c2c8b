"""Sets of feature pairs, and the package's table of legal pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from equivcheck.campaign.coverage.features import Feature
from equivcheck.system.choice import PrintableEnum

TABLE = "legal_pairs.json"
"""Table of legal pairs, made by `equivcheck coverage --legal` at each release."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A set of feature pairs, as a symmetric bit matrix: bit j in row i says if features i and j form a pair."""

    features: tuple[Feature, ...]
    """All features. A feature's number is its position."""
    rows: tuple[int, ...]
    """One row of bits for each feature."""

    @property
    def count(self) -> int:
        """Number of pairs. A feature does not form a pair with itself."""
        return sum(row.bit_count() for row in self.rows) // 2

    def of(self, feature: int) -> Iterator[int]:
        """Yield the index of each feature that forms a pair with the feature at index `feature`."""
        row = self.rows[feature]
        return (other for other in range(len(self.features)) if row >> other & 1)


def pairs_of(features: Iterable[Feature], pairs: Iterable[tuple[Feature, Feature]]) -> Pairs:
    """Build a set of pairs. `features` are all features, also those without a pair."""
    order = tuple(sorted(features))
    numbers = {feature: number for number, feature in enumerate(order)}
    rows = [0] * len(order)
    for one, other in pairs:
        rows[numbers[one]] |= 1 << numbers[other]
        rows[numbers[other]] |= 1 << numbers[one]
    return Pairs(order, tuple(rows))


@cache
def legal_pairs() -> Pairs:
    """Pairs of features that one scenario can have, read from the table in the package."""
    return read_pairs(files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))


def read_pairs(text: str) -> Pairs:
    """Read a table of pairs.

    Raises `ValueError` if the text is not JSON, or if features do not have one row each. Raises `KeyError` or `TypeError` if it
    is not a table.
    """
    table = json.loads(text)
    pairs = Pairs(tuple(Feature(*names) for names in table["features"]), tuple(int(row, 16) for row in table["pairs"]))
    if len(pairs.rows) != len(pairs.features):
        raise ValueError(f"the table has {len(pairs.rows)} rows, not one for each of {len(pairs.features)} features")
    return pairs


def format_pairs(pairs: Pairs) -> str:
    """Return the text that `read_pairs` reads: a table with these pairs."""
    rows = [[feature.part, feature.noun, feature.field, feature.value] for feature in pairs.features]
    lines = ",\n".join(json.dumps(row) for row in rows), ",\n".join(json.dumps(f"{row:x}") for row in pairs.rows)
    return '{{\n"features": [\n{}\n],\n"pairs": [\n{}\n]\n}}\n'.format(*lines)


class ModelFamily(PrintableEnum):
    """Kind of model input that a feature needs: tokens, sequences or any rows. The strictest kind comes first.

    Features that need `ROWS` can occur in every model.
    """

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    ROWS = "rows"


_OF_SEQUENCES = {"Attention", "ContextParallel"}
"""Classes that need sequence positions."""
_OF_TOKENS = {"Tokens", "Head", "CrossEntropy"}
"""Classes for token models."""
_ENDS = {(noun, field) for noun in ("TensorParallel", "LocalTensorParallel") for field in ("source", "head")}
_CHOSEN = {("Model", "source"), ("Model", "head"), ("Training", "loss"), *_ENDS}
"""Fields that belong to token models, unless their value is listed here."""
_OF_ANY_MODEL = {"None", "NOT_IN_PLAN", "LINEAR_MEAN", "LINEAR_SUM", "MSE_MEAN", "MSE_SUM"}


def family_of(feature: Feature) -> ModelFamily:
    """Return the kind of model input that a feature needs. Returns `ROWS` if the feature works with all kinds."""
    chosen = (feature.noun, feature.field) in _CHOSEN and feature.value.rpartition(".")[2] not in _OF_ANY_MODEL
    if chosen or feature.noun in _OF_TOKENS:
        return ModelFamily.TOKENS
    is_length = (feature.noun, feature.field) == ("Model", "length") and feature.value != "None"
    return ModelFamily.SEQUENCES if is_length or feature.noun in _OF_SEQUENCES else ModelFamily.ROWS


def by_families(pairs: Pairs) -> dict[ModelFamily, int]:
    """Count the pairs for each kind of model input. A pair counts for the kind that its more demanding feature needs."""
    order = tuple(ModelFamily)
    families = [order.index(family_of(feature)) for feature in pairs.features]
    masks = [sum(1 << number for number, family in enumerate(families) if family == each) for each in range(len(order))]
    counts = dict.fromkeys(order, 0)
    for row, family in zip(pairs.rows, families, strict=True):
        for other, mask in enumerate(masks):
            counts[order[min(family, other)]] += (row & mask).bit_count()
    return {family: count // 2 for family, count in counts.items()}
