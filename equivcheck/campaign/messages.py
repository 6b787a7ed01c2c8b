"""Messages between a worker and its supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.campaign.counts.tally import Tally
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzz:
    """To the worker: draw and check cases until the time is up or enough are checked."""

    seconds: float
    """Seconds from the arrival of this message."""
    num_checks: float
    """Number of checks; infinite for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOne:
    """To the worker: check this case, answer with `Checked`, and end."""

    case: Case
    """Case to check."""
    beyond: bool = False
    """Whether to run it even if torch does not support it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MayShrink:
    """To the worker: answer to a `Found` with `asks`."""

    yes: bool
    """Whether to shrink; False if another worker does or did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """To a worker that draws: shrink a finding whose worker was lost with its machine."""

    verdict: CaseVerdict
    """Verdict of the finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From the worker: all imports are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """From the worker: counts, several times a second."""

    tally: Tally
    """Checks since the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """From the worker: a finding, or a smaller case for one."""

    verdict: CaseVerdict
    """Verdict of the finding."""
    asks: bool = False
    """Whether the worker waits for `MayShrink`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """From the worker: a case failed and is about to run again in a process of its own, or that run is done."""

    verdict: CaseVerdict | None
    """Verdict to be confirmed; None once it is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """From the worker: answer to `CheckOne`."""

    verdict: CaseVerdict
    """Verdict on the case."""
    seconds: float
    """Duration of the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """From the worker: the checker raised an exception."""

    summary: str
    """``Type: message`` on one line."""
    trace: str
    """Traceback, and the case if one was being checked."""
    is_usage: bool = False
    """Whether it was a `UsageError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """From the worker: result of the control."""

    name: str
    """Name of the planted fault."""
    wrong: str
    """The mistake that it makes, in one sentence."""
    examples: int = 0
    """Cases checked with the fault, up to the catch."""
    seconds: float = 0.0
    """Seconds of work spent on it."""
    caught: bool = False
    """Whether it was caught. If not, a clean result of the campaign proves nothing."""
    passed_over: tuple[str, ...] = ()
    """Faults planted before this one and given up, because no generated case showed them in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """From the worker: last message before its time is up. A rank that could not be stopped still runs in its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From the worker: last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """In place of a worker's last message: it died, or was killed because it was stuck."""

    verdict: CaseVerdict | None
    """Verdict on the case it was checking; None if it had begun none."""
    seconds: float
    """Seconds since that check began."""
    printed: str
    """Last output of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """In place of a worker's last message: its machine is lost."""

    name: str
    """Name of the machine."""
    why: str
    """Reason in one line."""
