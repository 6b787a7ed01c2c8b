"""Opens worlds by name and keeps them open between checks."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, TypeVar

from equivcheck.errors import UsageError, unknown_name
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


def _torchrun(size: int | None) -> Ranks:
    from equivcheck.worlds.torchrun.world import TorchrunRanks

    return TorchrunRanks(size)


WORLDS: dict[str, Callable[[Any], Ranks]] = {"sim": _sim, "gloo": _gloo, "fake": _fake, "torchrun": _torchrun}
"""Constructor for each world's ranks by name; lazy, because each world imports torch."""
LOCAL_WORLDS = ("sim", "gloo")
"""Worlds with real values, available to any process."""
TORCHRUN = "torchrun"
"""World started by torchrun; each of its processes opens it at its full size."""
WORLDS_WITH_DATA = (*LOCAL_WORLDS, TORCHRUN)
"""All worlds with real values."""

MAX_LOCAL_RANKS = 64
"""Maximum ranks on one machine, each a thread or a process that uses torch."""

T = TypeVar("T")

_open: dict[tuple[str, int], Ranks] = {}


def open_ranks(world: str, size: int | None = None) -> Ranks:
    """Open new ranks of a world, or join the world that torchrun started. The caller closes them.

    Raises `UsageError` if the world does not exist or the size is not valid.
    """
    if world not in WORLDS:
        raise unknown_name("world", world, WORLDS)
    if size is None and world != TORCHRUN:
        raise UsageError(
            f"size None is not valid for {world}: only torchrun knows the number of ranks. "
            f"Expected a size, such as World({world!r}, size=2)."
        )
    if size is not None and size < 1:
        raise UsageError(f"size {size} is not valid: a world needs at least one rank. Expected 1 or more.")
    if world in LOCAL_WORLDS and size is not None and size > MAX_LOCAL_RANKS:
        raise UsageError(
            f"size {size:,} is not valid: {world} runs every rank on this machine. "
            f"Expected 1 to {MAX_LOCAL_RANKS}, or the world fake."
        )
    return WORLDS[world](size)


def ranks(world: str, size: int) -> Ranks:
    """Return N ranks of a world.

    They are opened at the first call and stay open until `close_worlds` or the end of the process.
    """
    if (world, size) not in _open:
        _open[world, size] = open_ranks(world, size)
    return _open[world, size]


def torchrun_ranks() -> Ranks:
    """Return all ranks started by torchrun together with this process. They stay open until `close_worlds`.

    Raises `UsageError` if torchrun did not start this process.
    """
    if (found := next((kept for (name, _), kept in _open.items() if name == TORCHRUN), None)) is not None:
        return found
    opened = open_ranks(TORCHRUN)
    _open[TORCHRUN, opened.size] = opened
    return opened


def on_first_rank(world: str | Ranks, work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only. Every rank then gets its result, or raises its exception.

    Every process must call this function.
    """
    if isinstance(world, Ranks):
        return world.on_first_rank(work)
    return torchrun_ranks().on_first_rank(work) if world == TORCHRUN else work()


def close_worlds() -> None:
    """Close all worlds opened by `ranks` and `torchrun_ranks`.

    Their threads and processes end, and torch's functions are as before.
    """
    while _open:
        _open.popitem()[1].close()


atexit.register(close_worlds)
