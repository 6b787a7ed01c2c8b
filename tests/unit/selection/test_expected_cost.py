"""What checks are expected to cost."""

from __future__ import annotations

from equivcheck.selection.expected_cost import expected_cost
from unit.campaign import fakes


def test_more_work_costs_more() -> None:
    """Ranks cost in proportion, steps and layers less than that."""
    one = expected_cost(fakes.scenario(ranks=1))
    assert expected_cost(fakes.scenario(ranks=8)) == 8 * one
    assert one < expected_cost(fakes.scenario(ranks=1, steps=4)) < 4 * one
    assert one < expected_cost(fakes.scenario(ranks=1, layers=4)) < 4 * one
