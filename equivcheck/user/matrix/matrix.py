"""`Matrix`: one training under many layouts."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from equivcheck.errors import UsageError, did_you_mean
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.printable import shorten
from equivcheck.user.check import check_training
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import LayoutRow
from equivcheck.user.task import mesh_of
from equivcheck.user.usage import invalid
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.patience import cpu_seconds_of_family
from equivcheck.worlds.ranks import Ranks

ARGUMENTS = inspect.signature(check_training).parameters
"""Parameters that `check_training` takes."""
OF_TRAINING = (
    *("model", "batches", "loss", "optimizer", "reduction", "scheduler", "step", "dtype", "seed"),
    *("also", "keep_dtype", "dropout_masks"),
)
"""Arguments for the single-device run. All layouts use the same values, so that their rows are comparable."""
OF_LAYOUT = tuple(name for name in ARGUMENTS if name not in OF_TRAINING)
"""Arguments that each layout may set."""
REQUIRED = tuple(name for name, each in ARGUMENTS.items() if each.default is each.empty or name == "parallelize")
"""Arguments without a default, and `parallelize`, which may be left out only if a trainer is given."""
EXPECTED = "expected"
"""Further key in a layout: its expected outcome."""

_invalid = partial(invalid, api="matrix")

Listener = Callable[[LayoutRow, int], None]
"""Called with each finished row and the row count so far."""


class Matrix:
    """One training under many layouts.

    `layouts` maps a name to a dict with the layout's own arguments for `check_training`: `mesh`, `parallelize`, and any other
    argument that does not affect the single-device run. Arguments outside `layouts` are for all layouts, except a layout with
    its own value. A layout that is wrong on purpose sets ``"expected": "diverged"``::

        Matrix(
            model=build, batches=batches, loss=loss, optimizer=optimizer,
            layouts={
                "ddp": {"mesh": {"dp": 2}, "parallelize": wrap_in_ddp},
                "tp": {"mesh": {"tp": 2}, "parallelize": apply_plan},
            },
        ).run().assert_passed()

    Raises `UsageError` if an argument is unknown or missing.
    """

    def __init__(self, *, layouts: Mapping[str, Mapping[str, Any]], **shared: Any) -> None:
        _require_known(shared, tuple(ARGUMENTS), "the matrix")
        if not isinstance(layouts, Mapping) or not layouts:
            raise _invalid(f"layouts {layouts!r:.100}", "it is empty or not a dict", "a dict of layouts by name")
        if "batches" in shared:
            shared["batches"] = tuple(shared["batches"])  # a shuffling DataLoader yields other batches each time
        self._shared = shared
        self._layouts = {name: _Layout(name, options, shared) for name, options in layouts.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Layout names, in order."""
        return tuple(self._layouts)

    @property
    def unchecked(self) -> tuple[LayoutRow, ...]:
        """Rows for all layouts, before they are checked."""
        return tuple(self._layouts[name].row(None, "it was not checked yet", 0.0) for name in self.names)

    def run(self, *names: str, world: str | None = None, listener: Listener = lambda _row, _count: None) -> MatrixResult:
        """Check the named layouts, or all, one after the other in this process. `world` replaces the world given by each layout.

        `listener` is called with each row and the number of rows so far.
        """
        asked, rows = chosen(names, self.names), list[LayoutRow]()
        for name in asked:
            rows.append(self.row(name, world))
            listener(rows[-1], len(rows))
        return MatrixResult(rows=tuple(rows), asked=len(asked))

    def row(self, name: str, world: str | Ranks | None = None) -> LayoutRow:
        """Check one layout. An exception from its arguments or from the single-device run becomes the row's error."""
        layout, started = self._layouts[name], _cpu_seconds()
        verdict: UserVerdict | None = None
        error = ""
        try:
            given = {"name": name} | self._shared | layout.options | ({} if world is None else {"world": world})
            verdict = check_training(**given)
        except Exception as raised:
            error = str(raised) if isinstance(raised, UsageError) else f"{type(raised).__name__}: {raised}"
        return layout.row(verdict, error, (_cpu_seconds() - started) * 1000)


def matrix(*, layouts: Mapping[str, Mapping[str, Any]], **shared: Any) -> MatrixResult:
    """Check one training under many layouts, and return a row for each. Arguments are those of `Matrix`."""
    return Matrix(layouts=layouts, **shared).run()


def chosen(names: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the layouts in `names`, in the order of `allowed`; all layouts if `names` is empty.

    Raises `UsageError` for an unknown name.
    """
    for name in names:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise _invalid(f"layout {shorten(repr(name), 100)}", "it does not exist", f"one of {', '.join(allowed)}", hint=hint)
    return tuple(name for name in allowed if not names or name in names)


class _Layout:
    def __init__(self, name: str, options: Mapping[str, Any], shared: dict[str, Any]) -> None:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise _invalid(f"layout name {shorten(repr(name), 100)}", "it is not printable text", "a printable name")
        if not isinstance(options, Mapping):
            raise _invalid(f"layout {name!r}", f"it is {options!r:.100}", "a dict of arguments for check_training")
        _require_known(options, (*OF_LAYOUT, EXPECTED), f"layout {name!r}")
        given = {*shared, *options}
        given |= {"parallelize"} if "trainer" in given else set()
        missing = [key for key in REQUIRED if key not in given]
        if missing:
            expected = f"values for {', '.join(REQUIRED)}, in the layout or in the arguments that all layouts share"
            raise _invalid(f"layout {name!r}", f"it has no {' and no '.join(missing)}", expected)
        self.name = name
        self.options = {key: value for key, value in options.items() if key != EXPECTED}
        self.mesh = mesh_of((shared | self.options)["mesh"])
        self.expected = _outcome(name, options.get(EXPECTED, Outcome.EQUIVALENT.value))

    def row(self, verdict: UserVerdict | None, error: str, milliseconds: float) -> LayoutRow:
        return LayoutRow(
            name=self.name, mesh=self.mesh, expected=self.expected, verdict=verdict, error=error, milliseconds=milliseconds
        )


def _require_known(given: Mapping[str, Any], allowed: Sequence[str], whose: str) -> None:
    for key in given:
        if key not in allowed:
            why = "all layouts share it, so it belongs outside the layouts" if key in OF_TRAINING else "there is no such argument"
            hint = did_you_mean(str(key), allowed)
            raise _invalid(f"{shorten(repr(key), 100)} in {whose}", why, f"one of {', '.join(allowed)}", hint=hint)


def _outcome(name: str, value: object) -> Outcome:
    try:
        return Outcome(value)
    except ValueError:
        given = f"expected {shorten(repr(value), 100)} in layout {name!r}"
        raise _invalid(given, "it is not an outcome", f"one of {', '.join(outcome.value for outcome in Outcome)}") from None


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its children, because ranks may be processes."""
    own = os.getpid()
    return time.process_time() + sum(used for process, used in cpu_seconds_of_family(own).items() if process != own)
