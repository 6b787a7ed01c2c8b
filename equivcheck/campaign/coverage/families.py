"""Model families, and their feature pairs."""

from __future__ import annotations

from equivcheck.campaign.coverage.features import Feature
from equivcheck.campaign.coverage.pairs import Pairs
from equivcheck.system.choice import Choice


class Family(Choice):
    """Kinds of model inputs, most demanding first."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    ROWS = "rows"


_OF_SEQUENCES = {"Attention", "ContextParallel"}
"""Nouns that need positions."""
_OF_TOKENS = {"Tokens", "Head", "CrossEntropy"}
"""Nouns for token models."""
_ENDS = {(noun, field) for noun in ("TensorParallel", "LocalTensorParallel") for field in ("source", "head")}
_CHOSEN = {("Model", "source"), ("Model", "head"), ("Training", "loss"), *_ENDS}
"""Fields that belong to token models, unless they have one of the values below."""
_OF_ANY_MODEL = {"None", "OUTSIDE", "LINEAR_MEAN", "LINEAR_SUM", "MSE_MEAN", "MSE_SUM"}


def family_of(feature: Feature) -> Family:
    """The only family of models with a feature; rows for features that all models have."""
    chosen = (feature.noun, feature.field) in _CHOSEN and feature.value.rpartition(".")[2] not in _OF_ANY_MODEL
    if chosen or feature.noun in _OF_TOKENS:
        return Family.TOKENS
    is_length = (feature.noun, feature.field) == ("Model", "length") and feature.value != "None"
    return Family.SEQUENCES if is_length or feature.noun in _OF_SEQUENCES else Family.ROWS


def by_families(pairs: Pairs) -> dict[Family, int]:
    """Number of pairs per family. A pair belongs to tokens if one feature does, else to sequences if one does."""
    order = tuple(Family)
    families = [order.index(family_of(feature)) for feature in pairs.features]
    masks = [sum(1 << number for number, family in enumerate(families) if family == each) for each in range(len(order))]
    counts = dict.fromkeys(order, 0)
    for row, family in zip(pairs.rows, families, strict=True):
        for other, mask in enumerate(masks):
            counts[order[min(family, other)]] += (row & mask).bit_count()
    return {family: count // 2 for family, count in counts.items()}
