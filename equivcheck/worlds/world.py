"""The public world: any function on N ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from equivcheck.worlds.pool import open_ranks
from equivcheck.worlds.ranks import Ranks, Run


class World:
    """N ranks, each with `torch.distributed` initialised, kept alive until closed.

    ::

        with World("sim", size=4) as world:
            run = world.run(lambda: torch.distributed.get_rank())
        assert run.values == (0, 1, 2, 3)
    """

    def __init__(self, name: str = "sim", *, size: int | None = None) -> None:
        """`size` may be left out for ``torchrun``, whose ranks are there already."""
        self.ranks: Ranks = open_ranks(name, size)
        """What runs programs."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.size

    def run(self, program: Callable[..., Any], *arguments: Any, schedule_seed: int = 0, deadline: float = 60.0) -> Run:
        """Call ``program(*arguments)`` on every rank.

        After each run state is as it was before: what torch keeps for a process or a thread, its functions and methods, random
        generators, environment variables, the working directory. ``docs/explanation/reliability.md`` says what is not seen.

        In ``sim`` and ``fake`` ranks are threads of this process. A program that ends its process (`os._exit`, a fatal error in
        native code) ends this one; in ``gloo`` it ends a rank, and `RanksFailed` says how. In ``sim`` a rank that hangs in native
        code cannot be stopped: the error says so, and later runs warn, as its thread may still change what they share.

        Ranks that are idle, or compute without communicating, for `deadline` seconds count as hung.

        In ``gloo`` and ``torchrun`` the program and its arguments must be picklable. In ``torchrun`` every process of the world
        calls this: what rank 0 passes runs on all, and each gets the same `Run`, or error; a run that fails is the last. In
        ``fake`` the first rank runs alone, of as many as one likes: what it receives has the right shape and no meaning, and
        `Run` has its value only.

        Raises `equivcheck.worlds.failure.RanksFailed` when a rank raises, dies (in ``gloo`` also by a kill from outside), or
        waits in vain, and when a copy that it made by `os.fork` comes out of the program or is left running; the world can be
        used again afterwards. Raises `equivcheck.worlds.failure.RanksDidNotStart` when ranks are lost again and again before they
        have made their world.
        """
        return self.ranks.run(program, *arguments, schedule_seed=schedule_seed, deadline=deadline)

    def close(self) -> None:
        """End every rank and undo whatever was changed in this process."""
        self.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def without_cover(world: str | Ranks | World) -> str | Ranks:
    """A world as checks take it: its name, or its ranks."""
    return world.ranks if isinstance(world, World) else world
