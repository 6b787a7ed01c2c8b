"""What checks are expected to cost."""

from __future__ import annotations

from equivcheck.campaign.selection.novelty import expected_cost
from unit.campaign import fakes


def test_more_work_costs_more() -> None:
    """Ranks, steps and layers cost less than in proportion, all alike."""
    one = expected_cost(fakes.scenario(ranks=1))
    assert one < expected_cost(fakes.scenario(ranks=4)) < 4 * one
    assert expected_cost(fakes.scenario(ranks=4)) == expected_cost(fakes.scenario(ranks=1, steps=4))
    assert expected_cost(fakes.scenario(ranks=4)) == expected_cost(fakes.scenario(ranks=1, layers=4))
