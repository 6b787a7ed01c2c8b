"""Rank 0 handles other ranks' answers, and ranks without one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Any

import pytest

from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.worlds.failure import FailureKind, RankReport, RanksFailed, RankState
from equivcheck.worlds.gloo.answer import NUMBERS_OF_GROUPS, VALUE_TAG
from equivcheck.worlds.torchrun.leader import Leader
from equivcheck.worlds.torchrun.links import Link
from equivcheck.worlds.torchrun.place import Place
from equivcheck.worlds.torchrun.rank_thread import RankThread, request_task

DEADLINE = 0.5


@pytest.fixture
def other() -> Iterator[tuple[Leader, Link]]:
    """A leader of two ranks, and the other's end, which the test holds."""
    ours, its = Pipe()
    thread = RankThread(0)
    leader = Leader(Place(rank=0, size=2), {1: ours}, {0: "host-a", 1: "host-b"}, thread)
    yield leader, its
    leader.close()
    its.close()
    thread.end()


def request(program: Callable[..., Any], *arguments: Any) -> bytes:
    """Request to the ranks."""
    return request_task(pickle.dumps((program, arguments)), is_user_code=False)


def test_values_come_in_rank_order(other: tuple[Leader, Link]) -> None:
    """The leader's own rank runs the program too."""
    leader, end = other
    end.send(("answer", VALUE_TAG + NUMBERS_OF_GROUPS.pack(1, 1) + pickle.dumps("b")))
    assert leader.run(request(str, "a"), 60.0) == ("a", "b")


def test_a_process_that_ends_is_a_rank_that_died(other: tuple[Leader, Link]) -> None:
    """The failure names rank and host, and any later run raises it again, because no process is restarted."""
    leader, end = other
    end.close()
    for _ in range(2):
        with pytest.raises(RanksFailed, match=r"rank 1 was lost: its process has ended.* \(on host host-b\)") as caught:
            leader.run(request(str, "a"), 60.0)
    assert caught.value.failure.kind is FailureKind.DIED
    assert [report.state for report in caught.value.failure.reports] == [RankState.FINISHED, RankState.DIED]


@pytest.mark.slow
def test_a_process_that_takes_no_part_is_not_waited_for(other: tuple[Leader, Link]) -> None:
    """If no process computes, ranks count as hung; the silent one is reported as running."""
    leader, _ = other
    with pytest.raises(RanksFailed, match=r"idle for 0.5 s: .*\(on host host-a: 0; on host host-b: 1\)") as caught:
        leader.run(request(str, "a"), DEADLINE)
    assert caught.value.failure.kind is FailureKind.TIMEOUT
    assert caught.value.failure.reports[1] == RankReport(rank=1, state=RankState.RUNNING)


def test_others_hear_what_comes_of_the_work(other: tuple[Leader, Link]) -> None:
    """Other ranks get the value or the error once, from the outermost work; an outcome that cannot be pickled is sent as text."""
    leader, end = other
    assert leader.do(lambda: leader.do(lambda: 7)) == 7
    with pytest.raises(UsageError):
        leader.do(_refuse)
    leader.do(lambda: lambda: 0)

    told = []
    while end.poll():
        told.append(end.recv())
    assert [verb for verb, _ in told] == ["end"] * 3
    assert told[0][1] == (7, None, True)
    assert isinstance(told[1][1][1], UsageError)
    assert isinstance(told[2][1][1], EquivCheckError)


def _refuse() -> None:
    raise UsageError("no")
