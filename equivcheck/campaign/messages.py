"""What a worker and its supervisor say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.campaign.counts.tally import Tally
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzz:
    """To the worker: draw and check until the time is up, or as much is checked as it is to check."""

    seconds: float
    """From the arrival of this message."""
    num_checks: float
    """How many; infinite for no such end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOne:
    """To the worker: check this, say `Checked`, and end."""

    case: Case
    """What to check."""
    beyond: bool = False
    """Whether limits of torch do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MayShrink:
    """To the worker: the answer to a `Found` that asks."""

    yes: bool
    """Whether nobody else shrinks it, or has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """To a worker that draws: shrink what another was shrinking when its machine was lost."""

    verdict: CaseVerdict
    """What was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From the worker: everything is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """From the worker, a few times a second."""

    tally: Tally
    """Checks since the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """From the worker: a finding, or a smaller case for one."""

    verdict: CaseVerdict
    """What was found."""
    asks: bool = False
    """Whether the worker waits to be told whether to shrink it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """From the worker: ranks failed, and the same case is about to run again in a process of its own; or that is done."""

    verdict: CaseVerdict | None
    """The verdict that has not been confirmed yet; None once it is settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """From the worker: the answer to `CheckOne`."""

    verdict: CaseVerdict
    """What came of it."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """From the worker: the checker raised."""

    summary: str
    """``Type: message``, one line."""
    trace: str
    """The traceback, and the case if one was being checked."""
    is_usage: bool = False
    """Whether it refused what it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """From the worker: what came of the fault that is planted as part of the campaign."""

    name: str
    """The fault's."""
    wrong: str
    """What is wrong where it is planted."""
    examples: int = 0
    """Cases in which it was planted and checked, until it was caught."""
    seconds: float = 0.0
    """Of work that it took."""
    caught: bool = False
    """Whether it was found; if not, a clean result of the campaign proves nothing."""
    passed_over: tuple[str, ...] = ()
    """Names of faults that were planted before it, and given up because no generated case had shown them in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """From the worker: its last word before its time is up, as a rank that could not be stopped still runs in its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From the worker: its last word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """In the place of a worker's last word: it died, or was killed as it was stuck."""

    verdict: CaseVerdict | None
    """On the case that it had begun; None if it had begun none."""
    seconds: float
    """How long ago that was."""
    printed: str
    """What it printed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """In the place of a worker's last word: the machine that it was on is gone."""

    name: str
    """The machine's."""
    why: str
    """In a line."""
