"""The process that examines one mutant after the other."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from equivcheck.mutants.registry import mutant
from equivcheck.selftest.examine import Effort, examine
from equivcheck.selftest.row import Row
from equivcheck.workers.link import Link
from equivcheck.worlds.sim.interruption import abandoned_threads

_TELL_SECONDS = 0.2
"""How often a row is sent while it grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantDone:
    """From the process: the answer to the name of a mutant. Rows that it sends before are not yet complete."""

    row: Row
    """Complete, or with the reason why it is not."""
    is_spent: bool = False
    """Whether a rank that could not be stopped still runs in the process, so that it is of no use any more."""


class _Examination:
    """Remembers the row of one mutant as it grows, and tells the supervisor of it."""

    def __init__(self, name: str, link: Link) -> None:
        self._mutant, self._link = mutant(name), link
        self._row, self._told = Row.of(self._mutant), 0.0

    def complete(self, effort: Effort) -> Row:
        """The whole row, or what is known of it when the examination raises."""
        try:
            return examine(self._mutant, effort, self._tell)
        except Exception as error:
            return replace(self._row, broken=f"{type(error).__name__}: {error}".splitlines()[0])

    def _tell(self, row: Row) -> None:
        self._row = row
        if time.monotonic() - self._told >= _TELL_SECONDS or row.shrunk is not None:
            self._told = time.monotonic()
            self._link.send(row)


def main(fd: int) -> None:
    """Serve the supervisor at the other end of `fd` until it ends."""
    link = Link(fd)
    while True:
        row = _Examination(link.next(), link).complete(link.task)
        link.send(MutantDone(row=row, is_spent=bool(abandoned_threads())))
