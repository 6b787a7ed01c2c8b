"""Two gloo ranks shared by all tests here: starting the fork server costs seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from equivcheck.worlds.gloo.world import GlooRanks


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[GlooRanks]:
    """Open for the whole session, so that the fork server stays."""
    with GlooRanks(2) as ranks:
        yield ranks


@pytest.fixture
def ranks(shared_ranks: GlooRanks) -> GlooRanks:
    """Two ranks that can be used."""
    return shared_ranks


def is_there(pid: int) -> bool:
    """Whether a process still runs: one that nobody has waited for does not, unless one of its threads still ends."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


@pytest.fixture
def gone() -> Callable[..., bool]:
    """Whether all of some processes end, in a minute at most."""

    def wait(*pids: int) -> bool:
        limit = time.monotonic() + 60
        while any(map(is_there, pids)) and time.monotonic() < limit:
            time.sleep(0.01)
        return not any(map(is_there, pids))

    return wait
