"""`Turns` runs one function at a time, lets them meet, and ends all if one fails."""

from __future__ import annotations

import threading

import pytest

from equivcheck.diagnosis.emulation.turns import NotTogether, Turns


def test_one_runs_at_a_time_and_all_meet_in_order() -> None:
    """Each function continues with its own part of the common result."""
    turns, order = Turns(3), list[tuple[str, int]]()

    def function(number: int) -> list[int]:
        found = []
        for meeting in range(2):
            order.append(("before", number))
            found.append(turns.meet(number, number + meeting, lambda all_: [sum(all_) + own for own in all_]))
            order.append(("after", number))
        return found

    assert turns.run(function) == [[3, 7], [4, 8], [5, 9]]
    assert order[:6] == [("before", 0), ("before", 1), ("before", 2), ("after", 0), ("before", 0), ("after", 1)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_where_one_raises_all_end(failing: int) -> None:
    """The first exception is raised, and all threads end."""
    turns, before = Turns(3), threading.active_count()

    def function(number: int) -> None:
        turns.meet(number, None, lambda all_: all_)
        if number == failing:
            raise KeyError(number)
        turns.meet(number, None, lambda all_: all_)

    with pytest.raises((KeyError, NotTogether)):
        turns.run(function)
    assert threading.active_count() == before


@pytest.mark.parametrize("ending", [0, 2])
def test_one_that_ends_early_is_not_waited_for(ending: int) -> None:
    """The others get an exception instead of waiting."""
    turns = Turns(3)

    def function(number: int) -> None:
        if number != ending:
            turns.meet(number, None, lambda all_: all_)

    with pytest.raises(NotTogether):
        turns.run(function)


def test_what_fails_where_all_meet_fails_for_all() -> None:
    """An exception in the common function is raised, too."""
    turns = Turns(2)

    def together(_all: list[object]) -> list[object]:
        raise ArithmeticError("together")

    with pytest.raises(ArithmeticError, match="together"):
        turns.run(lambda number: turns.meet(number, None, together))
