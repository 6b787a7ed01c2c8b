"""Charts show numbers where they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.report.frame.charts import BOTTOM, LEFT, RIGHT, TOP, error_bars, line, plot, round_steps

SIZES = st.floats(1e-9, 1e9)


@given(SIZES)
def test_a_scale_has_a_few_round_numbers(most: float) -> None:
    """From zero, equally far from each other, none beyond the largest value, and no gap at the end."""
    marks = round_steps(most)
    assert marks[0] == 0
    assert 3 <= len(marks) <= 6 or most < 1e-8
    assert marks[-1] <= most * (1 + 1e-6) + 1e-9
    assert marks[-1] + 1.001 * marks[1] >= most or most < 1e-8


@given(st.lists(st.tuples(st.floats(0.001, 1e6), st.floats(0, 1e9)), min_size=1, max_size=500))
def test_a_line_stays_within_its_scales(points: list[tuple[float, float]]) -> None:
    """From nothing at the beginning to the last value; long ones are thinned out, their end is not."""
    drawn = line(sorted(points))
    assert len(drawn.points) <= 202
    assert drawn.points[0] == (LEFT, BOTTOM)
    assert drawn.points[-1][0] == RIGHT
    for x, y in drawn.points:
        assert LEFT <= x <= RIGHT
        assert TOP <= y <= BOTTOM


@pytest.mark.parametrize(("seconds", "unit", "last"), [(90.0, "seconds", "80"), (600.0, "minutes", "10"), (36e3, "hours", "10")])
def test_time_is_told_in_a_unit_of_its_size(seconds: float, unit: str, last: str) -> None:
    """The scale ends with a round number of it."""
    drawn = line([(seconds, 5.0)])
    assert (drawn.unit, drawn.across[-1].text) == (unit, last)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 10**6)), min_size=1))
def test_no_error_is_left_out_of_a_histogram(sizes: list[tuple[float, int]]) -> None:
    """What is too small or too large for its scale is at its end."""
    drawn = error_bars(sizes)
    shown = sum(int(bar.text.rsplit(": ")[1].replace(",", "")) for bar in drawn.bars)
    assert shown == sum(number for _, number in sizes)
    for bar in drawn.bars:
        assert LEFT <= bar.x < bar.x + bar.width <= RIGHT
        assert TOP <= bar.y < BOTTOM


def test_errors_beyond_the_tolerance_are_right_of_its_mark() -> None:
    """Those below are left of it."""
    (below, beyond) = error_bars([(0.9, 1), (1.1, 1)]).bars
    assert below.x + below.width <= error_bars([(0.9, 1)]).tolerance <= beyond.x


def test_values_that_are_told_alike_are_drawn_alike() -> None:
    """Losses that differ by rounding lie in one place, and no two marks beside them have the same text."""
    drawn = plot({"one device": [1.357], "ranks": [1.357 + 1e-12]})
    (first,), (second,) = (curve.points for curve in drawn.curves)
    assert first == pytest.approx(second)
    assert len({mark.text for mark in drawn.up}) == len(drawn.up)
