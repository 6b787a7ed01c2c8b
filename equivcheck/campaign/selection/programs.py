"""Selects drawn tensor programs that are worth a check."""

from __future__ import annotations

from collections import deque

from equivcheck.campaign.coverage.programs import ProgramReach
from equivcheck.programs.nouns import TensorProgram

WINDOW = 3
"""Programs drawn per check. Drawing a program takes a twentieth of a check's time."""
_REMEMBERED = 100_000
"""Programs after which the set of checked programs is cleared."""


class ProgramSelection:
    """Chooses a tensor program if no recent program had more new combinations of operation and placement per statement.

    A program is not chosen if it was checked before.
    """

    def __init__(self) -> None:
        self._reach = ProgramReach()
        self._checked: set[int] = set()
        self._recent: dict[bool, deque[float]] = {each: deque(maxlen=WINDOW - 1) for each in (False, True)}

    def wants(self, program: TensorProgram, *, may_be_known: bool = False) -> bool:
        """Return whether to check a program, and remember it if so.

        `may_be_known` says whether the program could show a known issue.
        """
        mark = hash(program)
        if mark in self._checked:
            return False
        gain, recent = self._reach.gain(program) / len(program.statements), self._recent[may_be_known]
        wanted = gain >= max(recent, default=0.0)
        recent.append(gain)
        if wanted:
            if len(self._checked) >= _REMEMBERED:
                self._checked.clear()
            self._checked.add(mark)
            self._reach.add(program)
        return wanted
