"""Conditions under which unfinished ranks count as hung."""

from __future__ import annotations

import pytest

from equivcheck.worlds import patience
from equivcheck.worlds.patience import MOST_LIMITS, TICKS, Patience

LIMIT = 30.0
TICK = LIMIT / TICKS


class Ranks:
    """Two rank processes on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: float = LIMIT) -> None:
        self.now, self.used, self.moves = 0.0, [5.0, 9.0], 0
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.now)
        self.readings = 0
        self.patience = Patience(limit, self.read, lambda: self.moves)

    def read(self) -> dict[int, float]:
        """CPU time of both."""
        self.readings += 1
        return dict(enumerate(self.used))

    def pass_ticks(self, count: int, *, share: float = 0.0, moves: int = 0, rank: int = 0) -> str:
        """Pass ticks in which a rank has a share of a core; return the reason if the ranks count as hung."""
        for _ in range(count):
            self.now += self.patience.tick
            self.used[rank] += share * self.patience.tick
            self.moves += moves
            if why := self.patience.exhausted():
                return why
        return ""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Ranks that have just begun, after the first observation."""
    begun = Ranks(monkeypatch)
    assert begun.pass_ticks(1) == ""
    return begun


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_merely_slow_go_on(ranks: Ranks, rank: int) -> None:
    """With a twentieth of a core, a rank takes twenty times the limit for half of it."""
    assert ranks.pass_ticks(10 * TICKS, share=0.05, rank=rank) == ""


def test_ranks_that_do_nothing_are_hung(ranks: Ranks) -> None:
    """Hung after the limit in wall time, because no work was observed."""
    assert ranks.pass_ticks(TICKS - 1) == ""
    assert ranks.pass_ticks(1) == "idle for 30 s"


def test_a_little_work_in_between_is_no_idleness(ranks: Ranks) -> None:
    """Only consecutive observations without work count."""
    assert ranks.pass_ticks(TICKS - 1) + ranks.pass_ticks(1, share=0.1) + ranks.pass_ticks(TICKS - 1) == ""


@pytest.mark.parametrize("limit", [1.0, 5.0, 10.0])
def test_a_step_of_the_clock_is_no_work(monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """An idle process uses 10 ms in each 5 s, the smallest step that a system counts. Under a short limit, that is much."""
    idle = Ranks(monkeypatch, limit)
    seconds = 0.0
    while not (why := idle.pass_ticks(1)) and seconds < 5 * limit:
        seconds += idle.patience.tick
        idle.used = [5.0 + 0.01 * (seconds // 5.0), 9.0 + 0.01 * ((seconds + 2.5) // 5.0)]
    assert why == f"idle for {limit:g} s"


@pytest.mark.parametrize("limit", [1.0, 5.0, 10.0, 60.0])
def test_a_rank_with_little_of_a_core_works_under_any_limit(monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """It gets a thirtieth of a core, which a system counts in steps."""
    slow = Ranks(monkeypatch, limit)
    for number in range(20 * TICKS):
        slow.used[0] = 5.0 + 0.01 * (number * slow.patience.tick / 30 // 0.01)
        assert slow.pass_ticks(1) == ""


def test_ranks_that_compute_for_ever_are_hung(ranks: Ranks) -> None:
    """Hung after the limit in CPU time of any rank."""
    assert ranks.pass_ticks(2 * TICKS, share=1.0, rank=1) == "nothing but computing for 30 s of CPU time"
    assert ranks.used[1] - 9.0 == pytest.approx(LIMIT + TICK)


def test_the_reason_stays_when_the_processes_are_gone(ranks: Ranks) -> None:
    """Ranks are killed before anyone reads the reason."""
    why = ranks.pass_ticks(2 * TICKS, share=1.0)
    ranks.used.clear()
    ranks.now += TICK
    assert ranks.patience.exhausted() == why != ""


def test_ranks_that_get_on_may_compute_for_longer(ranks: Ranks) -> None:
    """Calls show that a long training does not hang, up to a multiple of the limit."""
    assert ranks.pass_ticks(MOST_LIMITS * TICKS, share=1.0, moves=1) == ""
    assert ranks.pass_ticks(1, share=1.0, moves=1) == "not finished after 300 s of CPU time"


def test_a_short_run_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading CPU times would take as long as a short run."""
    begun = Ranks(monkeypatch)
    assert [begun.patience.exhausted() for _ in range(100)] == [""] * 100
    assert begun.readings == 0


def test_who_asks_often_sees_no_more_idleness(ranks: Ranks) -> None:
    """Observations are at least a tick apart."""
    ranks.now += TICK / 2
    assert [ranks.patience.exhausted() for _ in range(5 * TICKS)] == [""] * 5 * TICKS
