"""Simulated worlds shared by the tests of a module, since starting one costs more than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache

import pytest

from equivcheck.worlds.sim.ranks import SimRanks


@pytest.fixture(scope="module")
def world() -> Iterator[Callable[[int], SimRanks]]:
    """``world(size)`` gives the module's world of that size."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(closing(SimRanks(size))))
