"""Interface for all worlds: N ranks that run one function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import FailureKind, RanksFailed

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of a run in which all ranks finished."""

    values: tuple[Any, ...]
    """Return value of the program on each rank, in rank order."""
    calls: tuple[tuple[Call, ...], ...] = ()
    """Each rank's communication calls in issue order; empty if the world does not record them."""
    shardings: frozenset[str] = frozenset()
    """Operations for which DTensor computed a sharding, with their arguments' placements; empty if the world does not record
    them."""


def rerun_if_died(run: Callable[[], Run]) -> Run:
    """Call `run` and return its result. If a rank dies, call it once more, because the rank may have been killed from outside."""
    try:
        return run()
    except RanksFailed as error:
        if error.failure.kind is not FailureKind.DIED:
            raise
        return run()


class Ranks(ABC):
    """N ranks kept alive between runs, each with its own initialised `torch.distributed`."""

    name: ClassVar[str]
    """World name, as users type it."""
    has_data: ClassVar[bool] = True
    """Whether every rank runs and computes real values."""
    has_copies: ClassVar[bool] = False
    """Whether ranks are processes, each with its own copy of the program."""
    spans_hosts: ClassVar[bool] = False
    """Whether ranks may run on several hosts, which need not share a file system."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,
        deadline: float = 60.0,
        is_user_code: bool = True,
    ) -> Run:
        """Call ``program(*arguments)`` on every rank and wait for all of them.

        `deadline` in seconds is the `limit` of `Patience`, after which ranks count as hung. Raises `RanksFailed` if a rank
        raises, dies or hangs. Afterwards the ranks can be used again, with their state restored. `is_user_code=False` promises
        that the program runs only equivcheck's code and restores its state. Most state is then not checked for changes, because
        this takes a tenth of the time of the smallest check.
        """

    def prepare_to_compile(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Call `torch.compile` once before ranks start. Ranks then compile faster.

        Only ``gloo`` does this; other worlds do nothing.
        """

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 only, and return its result or raise its exception on every rank.

        In a world with several processes, every process calls this.
        """
        return work()

    @abstractmethod
    def close(self) -> None:
        """End every rank and undo all changes in this process. A second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
