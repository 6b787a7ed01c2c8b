"""Messages between a worker and its supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.campaign.tally import Tally
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.case import Checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzz:
    """Message to a worker: draw and check cases until the time is up or enough cases are checked."""

    seconds: float
    """Seconds for drawing and checking, counted from this message's arrival."""
    num_checks: float
    """Number of cases to check; infinite for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOne:
    """Message to a worker: check this case, answer with `Checked`, and end."""

    case: Checkable
    """Case to check."""
    beyond: bool = False
    """Whether to run the case even if it is beyond torch's limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MayShrink:
    """Message to a worker that waits after `Found`: whether it may shrink the finding."""

    yes: bool
    """Whether to shrink. False if another worker shrinks the finding, or has shrunk it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """Message to a drawing worker: shrink a finding, because its worker was lost with its machine."""

    verdict: CaseVerdict
    """Verdict on the finding, with its case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Message from a worker: all its imports are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Message from a worker, several times a second: the checks since the last such message."""

    tally: Tally
    """Counts of these checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Message from a worker: a new finding, or a smaller case for an earlier finding."""

    verdict: CaseVerdict
    """Verdict on the finding, with its case."""
    asks: bool = False
    """Whether the worker waits for `MayShrink`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """Message from a worker that checks a failed case again in a new process.

    It is sent with the first verdict before this check, and with None after it.
    """

    verdict: CaseVerdict | None
    """Verdict to be confirmed by the second run; None if this run is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Message from a worker: the answer to `CheckOne`."""

    verdict: CaseVerdict
    """Verdict on the case."""
    seconds: float
    """Duration of the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Message from a worker: the checker itself raised an exception."""

    summary: str
    """Error as ``Type: message`` on one line."""
    trace: str
    """Traceback, and the case if one was being checked."""
    is_usage: bool = False
    """Whether the error is a `UsageError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Message from a worker: which bug the campaign planted on purpose, and whether a check caught it."""

    name: str
    """The planted bug's name."""
    wrong: str
    """The mistake, in one sentence."""
    examples: int = 0
    """How many cases were checked with the bug, including the one that caught it."""
    seconds: float = 0.0
    """Seconds spent on these checks."""
    caught: bool = False
    """Whether a check caught the bug. If none did, a campaign without findings proves nothing."""
    passed_over: tuple[str, ...] = ()
    """Names of earlier bugs, dropped because no generated case showed them in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Last message from a worker if it ends early: a simulated rank in its process still runs and cannot be stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Last message from a worker after its budget is spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Replaces the last message of a dead worker: its process died, or was killed because it was stuck."""

    verdict: CaseVerdict | None
    """Verdict on the case in the current check; None if the worker had not begun a check."""
    seconds: float
    """Seconds since that check began."""
    printed: str
    """The process's last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """Replaces the last message of a worker whose machine is lost."""

    name: str
    """Name of the machine."""
    why: str
    """Reason, in one line."""
