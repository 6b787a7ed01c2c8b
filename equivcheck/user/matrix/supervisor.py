"""Checks a recipe's layouts in several worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from equivcheck.errors import UsageError
from equivcheck.user.matrix.matrix import Listener, chosen
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import LayoutRow
from equivcheck.user.matrix.worker import LayoutDone, Layouts, Order, Refused
from equivcheck.user.usage import invalid
from equivcheck.worlds.workers.process import Ended, WorkerProcess
from equivcheck.worlds.workers.supervision import Interruption, Pool


def check_recipe(order: Order, names: Sequence[str], *, num_workers: int, listener: Listener) -> MatrixResult:
    """Check layouts of a recipe in `num_workers` processes: those in `names`, or all if `names` is empty.

    After SIGINT or SIGTERM, return the rows known so far. Raises `UsageError` if the recipe defines no matrix or a layout name is
    unknown.
    """
    with Interruption() as interruption:
        return _Supervisor(order, names, num_workers, listener, interruption).run()


class _Checker(WorkerProcess):
    """Worker process that checks one layout after the other."""

    def __init__(self, order: Order) -> None:
        super().__init__("equivcheck.user.matrix.worker", order)
        self.name = ""
        """Current layout; empty while the process reads the recipe."""

    def begin(self, name: str) -> None:
        self.name = name
        self.send(name)


class _Supervisor:
    def __init__(
        self, order: Order, names: Sequence[str], num_workers: int, listener: Listener, interruption: Interruption
    ) -> None:
        self._order, self._names, self._num_workers = order, names, num_workers
        self._listener, self._interruption = listener, interruption
        self._pool = Pool[_Checker]()
        self._known: dict[str, LayoutRow] | None = None
        self._waiting: deque[str] = deque()
        self._done: dict[str, LayoutRow] = {}

    def run(self) -> MatrixResult:
        with self._pool as pool:
            pool.workers.append(_Checker(self._order))
            while pool.workers and not self._interruption.requested:
                for checker, message in pool.messages():
                    self._handle(checker, message)
        known = self._known or {}
        asked = chosen(self._names, tuple(known)) if known else ()
        rows = tuple(self._done[name] for name in asked if name in self._done)
        return MatrixResult(rows=rows, asked=len(asked), interrupted=self._interruption.requested)

    def _handle(self, checker: _Checker, message: object) -> None:
        if isinstance(message, Refused):
            raise UsageError(message.why)
        if isinstance(message, Layouts):
            self._start_checkers(message)
            self._next(checker)
        elif isinstance(message, LayoutDone):
            self._record(message.row)
            self._next(checker, is_spent=message.is_spent)
        elif isinstance(message, Ended):
            self._report_lost(checker)

    def _start_checkers(self, message: Layouts) -> None:
        """Start the other processes after the first one has read the recipe, because only then the number of layouts is known."""
        if self._known is None:
            self._known = {row.name: row for row in message.rows}
            self._waiting.extend(chosen(self._names, tuple(self._known)))
            for _ in range(min(self._num_workers, len(self._waiting)) - 1):
                self._pool.workers.append(_Checker(self._order))

    def _next(self, checker: _Checker, *, is_spent: bool = False) -> None:
        if self._waiting and not is_spent:
            checker.begin(self._waiting.popleft())
            return
        self._pool.remove(checker)
        if self._waiting:
            self._pool.workers.append(_Checker(self._order))

    def _report_lost(self, checker: _Checker) -> None:
        how = checker.how_it_ended()
        if not checker.name or self._known is None:
            raise invalid(
                f"{self._order.recipe}", f"the process that imported it {how}", "a file that can be imported", api="recipe"
            )
        self._record(replace(self._known[checker.name], error=f"the process that checked it {how}"))
        self._next(checker, is_spent=True)

    def _record(self, row: LayoutRow) -> None:
        self._done[row.name] = row
        self._listener(row, len(self._done))
