"""Worlds by name, and those kept open between checks."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from equivcheck.errors import UsageError
from equivcheck.worlds.ranks import Ranks


def _sim(size: int) -> Ranks:
    from equivcheck.worlds.sim.ranks import SimRanks

    return SimRanks(size)


def _gloo(size: int) -> Ranks:
    from equivcheck.worlds.gloo.world import GlooRanks

    return GlooRanks(size)


def _fake(size: int) -> Ranks:
    from equivcheck.worlds.fake.ranks import FakeRanks

    return FakeRanks(size)


WORLDS: dict[str, Callable[[int], Ranks]] = {"sim": _sim, "gloo": _gloo, "fake": _fake}
"""How to open N ranks of each world; looked up by name only when asked, as each imports torch."""
COMPARABLE = ("sim", "gloo")
"""Those whose numbers mean something."""

MAX_RUNNING = 64
"""Ranks that run on one machine, each a thread or a process with torch in it."""

_open: dict[tuple[str, int], Ranks] = {}


def open_ranks(world: str, size: int) -> Ranks:
    """N new ranks of a world; the caller closes them. Raises `UsageError` for a world that does not exist, or not so large."""
    if world not in WORLDS:
        raise UsageError(f"world {world!r} does not exist; allowed: {', '.join(WORLDS)}")
    if size < 1:
        raise UsageError(f"a world of {size} ranks cannot run; allowed: at least 1")
    if world in COMPARABLE and size > MAX_RUNNING:
        raise UsageError(
            f"{size:,} ranks are too many for {world}, which runs all of them; allowed: 1 to {MAX_RUNNING} (fake has more)"
        )
    return WORLDS[world](size)


def ranks(world: str, size: int) -> Ranks:
    """N ranks of a world, opened at first use and kept until `close_worlds` or the end of the process."""
    if (world, size) not in _open:
        _open[world, size] = open_ranks(world, size)
    return _open[world, size]


def close_worlds() -> None:
    """Close every kept world: no rank, thread, process or patched torch global is left."""
    while _open:
        _open.popitem()[1].close()


atexit.register(close_worlds)
