"""Counting numbers by size."""

from __future__ import annotations

import math

import pytest

from equivcheck.campaign.tally import Histogram


def test_quantiles_are_within_their_stated_error() -> None:
    """The histogram's quantiles are off by at most 2.5 %."""
    found = Histogram()
    for number in range(1, 1001):
        found.add(number / 1000)
    assert found.quantile(0.5) == pytest.approx(0.5, rel=0.026)
    assert found.quantile(0.95) == pytest.approx(0.95, rel=0.026)


def test_next_to_nothing_is_zero() -> None:
    """An error of nothing is told as that, and not as the smallest number that is told apart."""
    found = Histogram()
    for number in (0.0, 1e-9, 0.25):
        found.add(number)
    assert found.quantile(0.5) == 0.0
    assert found.quantile(1.0) == pytest.approx(0.25, rel=0.026)


def test_nothing_has_no_quantile() -> None:
    """Of no number every quantile is NaN."""
    assert math.isnan(Histogram().quantile(0.5))


def test_buckets_hold_every_number() -> None:
    """Each near the middle of its bucket, smallest first."""
    found = Histogram()
    for number in (0.5, 3.0, 0.5, 0.01):
        found.add(number)
    assert [number for _, number in found.buckets] == [1, 2, 1]
    assert [middle for middle, _ in found.buckets] == pytest.approx([0.01, 0.5, 3.0], rel=0.026)
