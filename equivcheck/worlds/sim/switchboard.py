"""State shared by the ranks in one simulated world."""

from __future__ import annotations

from equivcheck.worlds.sim.exchange import BEFORE, CallMatcher, Mark, RawCall
from equivcheck.worlds.sim.scheduler import Scheduler
from equivcheck.worlds.sim.work import SimWork

MAX_GROUPS = 2000
"""Maximum groups in a world before it is built again for the next run, because torch keeps all groups."""


class Switchboard:
    """State shared by all ranks in a simulated world: scheduler, groups, recorded calls, and unfinished `Work` handles."""

    def __init__(self, size: int, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.calls: list[list[RawCall]] = [[] for _ in range(size)]
        self.marks: list[Mark] = [BEFORE] * size
        self.unwaited: set[SimWork] = set()
        self.last_waited: list[SimWork | None] = [None] * size
        self.store_waiters: list[int] = []
        self._exchanges: dict[tuple[str, tuple[int, ...]], CallMatcher] = {}

    def exchange(self, name: str, ranks: tuple[int, ...]) -> CallMatcher:
        """Return the `CallMatcher` for the group with this name and these ranks. It is created at the first call."""
        key = (name, ranks)
        if key not in self._exchanges:
            self._exchanges[key] = CallMatcher(ranks, self.scheduler)
        return self._exchanges[key]

    def abandon(self, rank: int) -> list[SimWork]:
        """Return the rank's unfinished `Work` handles, and mark them as finished, because the run is over."""
        works = [work for work in self.unwaited if work.group.global_rank == rank]
        for work in works:
            work.forget()
        self.unwaited.difference_update(works)
        return works

    def works_with_futures(self, rank: int) -> list[SimWork]:
        """Return the rank's unfinished `Work` handles whose future was requested.

        Handles on one group are in the order of the calls.
        """
        works = [work for work in self.unwaited if work.group.global_rank == rank and work.has_future]
        return sorted(works, key=lambda work: work.raw[2])

    @property
    def has_too_many_groups(self) -> bool:
        """Whether programs have created so many groups that the world should be closed and opened again."""
        return len(self._exchanges) > MAX_GROUPS

    def clear(self) -> None:
        """Forget all calls made in the last run. The process groups stay."""
        self.calls = [[] for _ in self.calls]
        self.marks = [BEFORE] * len(self.calls)
        self.unwaited.clear()
        self.last_waited = [None] * len(self.calls)
        self.store_waiters.clear()
        for exchange in self._exchanges.values():
            exchange.clear()
