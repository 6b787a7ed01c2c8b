"""Sim takes a tensor of any memory layout where gloo computes the right values of it, and refuses it where gloo does not."""

from __future__ import annotations

import itertools

import pytest

from collectives.memory_programs import CALLS, MEMORIES, is_right
from collectives.worlds import run_in
from equivcheck.worlds.failure import RanksFailed


@pytest.mark.parametrize("kind", CALLS)
def test_sim_refuses_what_gloo_gets_wrong(kind: str) -> None:
    """Each call in each combination of layouts: right in both worlds, or wrong on some rank over gloo and refused in sim."""
    for memories in itertools.product(MEMORIES, repeat=3):
        right_over_gloo = all(run_in("gloo", 2, is_right, kind, *memories))
        assert outcome_in_sim(kind, *memories) == ("right" if right_over_gloo else "refused"), f"{kind} of {memories}"


def outcome_in_sim(kind: str, *memories: str) -> str:
    """``right``, ``wrong``, ``refused`` with the number of an upstream issue, or another error's text."""
    try:
        return "right" if all(run_in("sim", 2, is_right, kind, *memories)) else "wrong"
    except RanksFailed as error:
        return "refused" if "pytorch #" in str(error) else str(error)
