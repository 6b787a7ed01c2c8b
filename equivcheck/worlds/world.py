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

        In ``sim`` and ``fake`` ranks are threads in this process. If a program ends its process (`os._exit`, a fatal error in
        native code), your process ends too. In ``gloo`` only the rank's own process ends, and `RanksFailed` says how. If a rank
        in ``sim`` hangs in native code, it cannot be stopped. The error says so, and later runs warn, because the thread may
        still change shared state.

        Ranks count as hung if they are idle, or compute without communicating, for `deadline` seconds.

        In ``gloo`` and ``torchrun`` the program and its arguments must be picklable. In ``torchrun`` every process calls this
        method. All processes run the program from rank 0, and get the same `Run` or error. After a failed run, no further run
        is possible. In ``fake`` only the first rank runs: tensors that it receives have the right shape but no meaningful
        values, and `Run` contains only its value.

        Raises `equivcheck.worlds.failure.RanksFailed` if a rank raises, hangs or dies, or if ``gloo`` loses a rank that was
        killed from outside. Raises the same error if a rank's program forks a process, and the new process returns from the
        program or outlives it. The world can be used again afterwards, except in ``torchrun``. Raises
        `equivcheck.worlds.failure.RanksDidNotStart` if ranks repeatedly end before they have connected to each other.
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
    """Return a world in the form that checks take: the name, or the `Ranks` inside a `World`."""
    return world.ranks if isinstance(world, World) else world
