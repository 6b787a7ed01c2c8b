"""Compares state after a program with the state before the program, and restores it."""

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
    """Restores process state after a program.

    The state consists of entries in a table, torch's variables, and torch's functions, classes and methods.
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
        """Restore all state on exit, except for entries in `lost`."""
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
    """Restore process state on exit, and warn if some state could not be restored. For a process that continues."""
    try:
        with keeper.kept():
            yield
    finally:
        if keeper.lost:
            names = ", ".join(keeper.lost)
            warnings.warn(f"a program changed state that cannot be restored in this process: {names}", RuntimeWarning, 4)


def read(entries: tuple[Entry, ...]) -> tuple[Any, ...]:
    """Return the current value of each entry."""
    return tuple([entry.read() for entry in entries])


def changes(entries: tuple[Entry, ...], before: tuple[Any, ...]) -> list[tuple[Entry, Any]]:
    """Return entries that differ now, with their old values. Entries that did not exist before do not count."""
    now = read(entries)
    if now == before:
        return []
    return [(entry, old) for entry, old, new in zip(entries, before, now, strict=True) if old is not ABSENT and old != new]
