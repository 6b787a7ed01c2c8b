"""Counting triples of features."""

from __future__ import annotations

from math import comb

from equivcheck.campaign.coverage.features import features
from equivcheck.campaign.coverage.pairs import legal_pairs
from equivcheck.campaign.coverage.reach import Triples

from .test_features import SCENARIO


def test_triples_are_counted_once() -> None:
    """Three features in the table are a triple, two a pair with each of both; the same scenario again adds none."""
    triples, count = Triples(), len(features(SCENARIO) & set(legal_pairs().features))
    assert triples.gain(SCENARIO) == comb(count, 3) + 2 * comb(count, 2) // 3
    triples.add(SCENARIO)
    assert triples.gain(SCENARIO) == 0
