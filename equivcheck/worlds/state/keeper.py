"""Compares the process state before and after a program, and restores it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from equivcheck.worlds.state.entry import ABSENT, Entry
from equivcheck.worlds.state.of_process import OF_PROCESS
from equivcheck.worlds.state.of_thread import OF_THREAD
from equivcheck.worlds.state.patches import Patches
from equivcheck.worlds.state.rank_variables import RankVariables

ENTRIES = OF_PROCESS + OF_THREAD
"""Entries to compare in the thread that owns a run, or in a process that is a rank."""


class StateKeeper:
    """Restores the process's state after a program ran.

    It restores all state in `ENTRIES`, torch's variables, and torch's functions, classes and methods.
    """

    def __init__(self) -> None:
        self.variables = RankVariables()
        self.patched: tuple[str, ...] = ()
        """Names in torch that the last program replaced."""
        self.lost: tuple[str, ...] = ()
        """State that the last program changed and that cannot be restored."""
        self._patches = Patches()
        self._values: tuple[Any, ...] = ()
        self._copies: dict[str, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside this context a program may change process state.

        On exit all of it is restored; `lost` names what cannot be restored.
        """
        self._patches.save()
        self._values = read(ENTRIES)
        self._copy()
        try:
            with self.variables.kept():
                yield
        finally:
            self.patched = self._patches.put_back()
            changed = changes(ENTRIES, self._values)
            self.lost = tuple(entry.name for entry, value in changed if not self._put(entry, value))

    def _copy(self) -> None:
        """Copy values that `read` does not describe fully, only if they are new."""
        for entry, value in zip(ENTRIES, self._values, strict=True):
            if entry.copy is not None and value is not ABSENT and self._copies.get(entry.name, (None,))[0] != value:
                self._copies[entry.name] = (value, entry.copy())

    def _put(self, entry: Entry, value: Any) -> bool:
        if entry.put is None:
            return False
        try:
            entry.put(value if entry.copy is None else self._copies[entry.name][1])
        except Exception:
            return False
        return True


@contextlib.contextmanager
def preserved_state(keeper: StateKeeper) -> Iterator[None]:
    """Inside this context a program may change process state. On exit the state is restored.

    A warning names state that cannot be restored. Use this in a process that continues after the program.
    """
    try:
        with keeper.kept():
            yield
    finally:
        if keeper.lost:
            names = ", ".join(keeper.lost)
            warnings.warn(f"a program changed state that cannot be restored in this process: {names}", RuntimeWarning, 4)


def read(entries: tuple[Entry, ...]) -> tuple[Any, ...]:
    """Return the current value of each piece of process state in `entries`."""
    return tuple([entry.read() for entry in entries])


def changes(entries: tuple[Entry, ...], before: tuple[Any, ...]) -> list[tuple[Entry, Any]]:
    """Return the entries whose value differs now from `before`, each with its old value.

    Entries that had no value before are left out.
    """
    now = read(entries)
    if now == before:
        return []
    return [(entry, old) for entry, old, new in zip(entries, before, now, strict=True) if old is not ABSENT and old != new]
