"""The public world: runs any function on N ranks."""

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
        """`size` may be omitted for ``torchrun``, whose ranks already exist."""
        self.ranks: Ranks = open_ranks(name, size)
        """Ranks that run the programs."""

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.ranks.size

    def run(self, program: Callable[..., Any], *arguments: Any, schedule_seed: int = 0, deadline: float = 60.0) -> Run:
        """Call ``program(*arguments)`` on every rank.

        State is restored after each run: torch's per-process and per-thread state, functions and methods of torch, random
        generators, environment variables and the working directory. ``docs/explanation/reliability.md`` lists the exceptions.

        In ``sim`` and ``fake`` ranks are threads of this process. A program that ends its process (`os._exit`, a fatal error in
        native code) ends your process too; in ``gloo`` it ends only a rank, and `RanksFailed` says how. In ``sim`` a rank that
        hangs in native code cannot be stopped: the error says so, and later runs warn, because its thread may still change shared
        state.

        Ranks count as hung if they are idle, or compute without communicating, for `deadline` seconds.

        In ``gloo`` and ``torchrun`` the program and its arguments must be picklable. In ``torchrun`` every process calls this
        method; all of them run the program of rank 0 and get the same `Run` or error, and a failed run is the last one. In
        ``fake`` only the first rank runs: tensors that it receives have the right shape but no meaningful values, and `Run` holds
        only its value.

        Raises `equivcheck.worlds.failure.RanksFailed` if a rank raises, hangs or dies, in ``gloo`` also if it is killed from
        outside. Raises the same if a process that a rank forks returns from the program or is left running. The world can be used
        again afterwards. Raises `equivcheck.worlds.failure.RanksDidNotStart` if ranks repeatedly end before they have formed
        their world.
        """
        return self.ranks.run(program, *arguments, schedule_seed=schedule_seed, deadline=deadline)

    def close(self) -> None:
        """End every rank and undo all changes in this process."""
        self.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def unwrap_world(world: str | Ranks | World) -> str | Ranks:
    """Return the form of a world that checks accept: its name, or its `Ranks`."""
    return world.ranks if isinstance(world, World) else world
