"""What every world offers: N ranks that can run one function."""

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
    """What N ranks left when all of them finished."""

    values: tuple[Any, ...]
    """What the program returned on each rank, in rank order."""
    calls: tuple[tuple[Call, ...], ...] = ()
    """Per rank, the communication calls in the order it issued them; empty in worlds that cannot see them."""
    shardings: frozenset[str] = frozenset()
    """Operations for which DTensor worked out a sharding, with the placements of their arguments; empty as `calls`."""


def again_if_died(run: Callable[[], Run]) -> Run:
    """Run, and once more, on ranks that are started afresh, if one of them dies: it may have been killed from outside."""
    try:
        return run()
    except RanksFailed as error:
        if error.failure.kind is not FailureKind.DIED:
            raise
        return run()


class Ranks(ABC):
    """N ranks kept alive between runs; each sees an initialised `torch.distributed` of its own."""

    name: ClassVar[str]
    """The world's name, as users type it."""
    has_data: ClassVar[bool] = True
    """Whether every rank runs, so that what they leave can be compared."""
    has_copies: ClassVar[bool] = False
    """Whether ranks are processes, each with a copy of what it is to run."""
    spans_hosts: ClassVar[bool] = False
    """Whether ranks may be on several hosts, which need not see the same files."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        schedule_seed: int = 0,
        deadline: float = 60.0,
        is_foreign: bool = True,
    ) -> Run:
        """Call ``program(*arguments)`` on every rank and wait for all of them.

        Ranks count as hung by `deadline`, in seconds, as `Patience` says. Raises `RanksFailed` when a rank raises, dies, or waits
        in vain; the ranks can be used again afterwards, and find state as it was before. A program that is not foreign runs code
        of equivcheck alone, which leaves state as it was: most of that is then not looked at, as looking would take a tenth of
        the time of the smallest check.
        """

    def prepare_to_compile(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Do once what each rank would have to do before it compiles for the first time, if ranks are still to be started."""

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; where every process of a world calls this, only that of rank 0 does the work."""
        return work()

    @abstractmethod
    def close(self) -> None:
        """End every rank and undo whatever was changed in this process; calling it twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
