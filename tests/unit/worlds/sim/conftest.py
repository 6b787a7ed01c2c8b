"""Simulated worlds shared by the tests of a module, because starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from equivcheck.worlds.sim.ranks import SimRanks


@pytest.fixture(scope="module")
def world() -> Iterator[Callable[[int], SimRanks]]:
    """``world(size)`` gives the module's world of that size."""
    worlds: dict[int, SimRanks] = {}

    def get(size: int) -> SimRanks:
        if size not in worlds:
            worlds[size] = SimRanks(size)
        return worlds[size]

    yield get
    for ranks in worlds.values():
        ranks.close()
