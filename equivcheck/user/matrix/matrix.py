"""One training and many layouts: what is to be checked."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.printable import in_short
from equivcheck.user.check import check_training
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import Row
from equivcheck.user.task import mesh_of
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.patience import cpu_seconds_of_family

ARGUMENTS = inspect.signature(check_training).parameters
"""What `check_training` takes."""
OF_TRAINING = (
    *("model", "batches", "loss", "optimizer", "reduction", "scheduler", "step", "dtype", "seed"),
    *("keep_dtype", "dropout_masks"),
)
"""Those that say what one device computes: all layouts have the same, or their rows would not be of one training."""
OF_LAYOUT = tuple(name for name in ARGUMENTS if name not in OF_TRAINING)
"""Those that each layout may have of its own."""
REQUIRED = tuple(name for name, each in ARGUMENTS.items() if each.default is each.empty)
"""Those that have no default."""
EXPECTED = "expected"
"""What else a layout may have: the outcome that it should have."""

Listener = Callable[[Row, int], None]
"""Called with each row, and how many there are with it."""


class Matrix:
    """One training, spread in many ways.

    `layouts` gives each layout a name and, as a dict, the arguments of `check_training` that are its own: `mesh`, `parallelize`,
    and any other that does not say what one device computes. All other arguments are shared; a layout's own come first. A layout
    that is wrong on purpose says so by ``"expected": "diverged"``. Raises `UsageError` for what `check_training` does not take.
    """

    def __init__(self, *, layouts: Mapping[str, Mapping[str, Any]], **shared: Any) -> None:
        _require_known(shared, tuple(ARGUMENTS), "the matrix")
        if not isinstance(layouts, Mapping) or not layouts:
            raise UsageError(f"matrix: layouts is {layouts!r:.100}; allowed: a dict of at least one layout by name")
        if "batches" in shared:
            shared["batches"] = tuple(shared["batches"])  # a DataLoader gives others each time
        self._shared = shared
        self._layouts = {name: _Layout(name, options, shared) for name, options in layouts.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The layouts, in order."""
        return tuple(self._layouts)

    @property
    def unchecked(self) -> tuple[Row, ...]:
        """The row of each layout while nothing is known of it."""
        return tuple(self._layouts[name].row(None, "it has not been checked yet", 0.0) for name in self.names)

    def run(self, *names: str, world: str | None = None, listener: Listener = lambda _row, _count: None) -> MatrixResult:
        """Check these layouts, or all, one after the other in this process; `world` in place of those that they ask for."""
        asked, rows = chosen(names, self.names), list[Row]()
        for name in asked:
            rows.append(self.row(name, world))
            listener(rows[-1], len(rows))
        return MatrixResult(rows=tuple(rows), asked=len(asked))

    def row(self, name: str, world: str | None = None) -> Row:
        """Check one layout. What its arguments, or the run on one device, raise is the row's error."""
        layout, started = self._layouts[name], _cpu_seconds()
        verdict: UserVerdict | None = None
        error = ""
        try:
            verdict = check_training(**self._shared | layout.options | ({} if world is None else {"world": world}))
        except Exception as raised:
            error = str(raised) if isinstance(raised, UsageError) else f"{type(raised).__name__}: {raised}"
        return layout.row(verdict, error, (_cpu_seconds() - started) * 1000)


def matrix(*, layouts: Mapping[str, Mapping[str, Any]], **shared: Any) -> MatrixResult:
    """Check one training under many layouts, one after the other; the arguments are those of `Matrix`."""
    return Matrix(layouts=layouts, **shared).run()


def chosen(names: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The layouts of these names, in the order of the matrix; all for none. Raises `UsageError`."""
    for name in names:
        if name not in allowed:
            raise UsageError(f"matrix: no layout {in_short(repr(name), 100)}; allowed: {', '.join(allowed)}")
    return tuple(name for name in allowed if not names or name in names)


class _Layout:
    """The arguments of one layout, checked."""

    def __init__(self, name: str, options: Mapping[str, Any], shared: dict[str, Any]) -> None:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UsageError(f"matrix: a layout is named {in_short(repr(name), 100)}; allowed: a name that can be printed")
        if not isinstance(options, Mapping):
            raise UsageError(f"matrix: layout {name!r} is {options!r:.100}; allowed: a dict of arguments of check_training")
        _require_known(options, (*OF_LAYOUT, EXPECTED), f"layout {name!r}")
        missing = [key for key, each in ARGUMENTS.items() if each.default is each.empty and key not in {*shared, *options}]
        if missing:
            raise UsageError(f"matrix: layout {name!r} has no {', no '.join(missing)}; needed: {', '.join(REQUIRED)}")
        self.name = name
        self.options = {key: value for key, value in options.items() if key != EXPECTED}
        self.mesh = mesh_of((shared | self.options)["mesh"])
        self.expected = _outcome(name, options.get(EXPECTED, Outcome.EQUIVALENT.value))

    def row(self, verdict: UserVerdict | None, error: str, milliseconds: float) -> Row:
        """What is known of it."""
        return Row(
            name=self.name, mesh=self.mesh, expected=self.expected, verdict=verdict, error=error, milliseconds=milliseconds
        )


def _require_known(given: Mapping[str, Any], allowed: Sequence[str], whose: str) -> None:
    for key in given:
        if key not in allowed:
            why = ", which all layouts share" if key in OF_TRAINING else ""
            raise UsageError(f"matrix: {whose} has {in_short(repr(key), 100)}{why}; allowed: {', '.join(allowed)}")


def _outcome(name: str, value: object) -> Outcome:
    try:
        return Outcome(value)
    except ValueError:
        allowed = ", ".join(outcome.value for outcome in Outcome)
        raise UsageError(f"matrix: layout {name!r} expects {in_short(repr(value), 100)}; allowed: {allowed}") from None


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it has started, as ranks that are processes."""
    own = os.getpid()
    return time.process_time() + sum(used for process, used in cpu_seconds_of_family(own).items() if process != own)
