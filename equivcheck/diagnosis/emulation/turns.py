"""Runs functions in turns, one at a time, each on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from equivcheck.errors import EquivCheckError

T = TypeVar("T")


class NotTogether(EquivCheckError):
    """A call raised an exception or ended, while other calls wait for it."""


class Turns:
    """Runs `size` calls of a function in turns. Each call runs until it has to wait for the others, or ends."""

    def __init__(self, size: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._given: list[Any] = [None] * size
        self._results: Sequence[Any] = ()
        self._num_met = 0
        self._ended: set[int] = set()
        self._error: BaseException | None = None

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call `function` with each number below `size`, each call on its own thread, and return the results.

        If calls raise, the first exception raised is raised again after all calls have ended.
        """
        if len(self._turns) == 1:
            return [function(0)]
        results: dict[int, T] = {}
        threads = [
            threading.Thread(target=self._run_one, args=(function, number, results), daemon=True)
            for number in range(len(self._turns))
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # such as Ctrl-C: each other function ends at its next turn
            self._error = error
            raise
        if self._error is not None:
            raise self._error
        return [results[number] for number in range(len(threads))]

    def meet(self, number: int, given: Any, together: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Pass the value `given`, and wait until all calls have passed theirs. `number` is this call's number.

        The last call applies `together` to all values. Each call returns its own entry in the result.
        """
        if self._ended:
            raise NotTogether("another emulated rank has ended, so this rank cannot wait for it")
        self._given[number], before = given, self._num_met
        if number == len(self._turns) - 1 and self._error is None:
            self._results = together(list(self._given))
            self._num_met += 1
        self._wake_next(number)
        self._turns[number].acquire()
        if self._error is not None:
            raise NotTogether("another rank failed")
        if self._num_met == before:
            raise NotTogether("another emulated rank ended while this rank waited for it")
        return self._results[number]

    def _run_one(self, function: Callable[[int], T], number: int, results: dict[int, T]) -> None:
        self._turns[number].acquire()
        try:
            if self._error is None:
                results[number] = function(number)
        except BaseException as error:
            self._error = self._error or error
        self._ended.add(number)
        self._wake_next(number)

    def _wake_next(self, number: int) -> None:
        """Wake the next function that has not ended; this may be the same function again."""
        size = len(self._turns)
        for distance in range(1, size + 1):
            following = (number + distance) % size
            if following not in self._ended:
                self._turns[following].release()
                return
