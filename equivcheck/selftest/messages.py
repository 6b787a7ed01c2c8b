"""What a process that examines mutants and its supervisor say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.selftest.effort import Effort
from equivcheck.selftest.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """To the process: examine a mutant."""

    name: str
    """The mutant's."""
    effort: Effort
    """What to spend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """From the process: what it knows of its mutant so far."""

    row: Row
    """Not yet complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """From the process: the answer to a job."""

    row: Row
    """Complete, or with the reason why it is not."""
