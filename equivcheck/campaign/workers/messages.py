"""Messages between a worker and its supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.campaign.tally import Tally
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.scenario.case import Checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzz:
    """Message to the worker: draw and check cases until the time is up or enough are checked."""

    seconds: float
    """Seconds to draw and check, counted from this message's arrival."""
    num_checks: float
    """Number of cases to check; infinite for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOne:
    """Message to the worker: check this case, answer with `Checked`, and end."""

    case: Checkable
    """Case to check."""
    beyond: bool = False
    """Whether to run the case even if torch does not support it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MayShrink:
    """Message to the worker: answer to a `Found` with `asks`."""

    yes: bool
    """Whether to shrink; False if another worker shrinks or shrank the finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """Message to a drawing worker: shrink a finding whose worker was lost with its machine."""

    verdict: CaseVerdict
    """Verdict with the finding's case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Message from the worker: all imports are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Message from the worker, several times a second: counts."""

    tally: Tally
    """Checks since the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Message from the worker: a finding, or a smaller case for one."""

    verdict: CaseVerdict
    """Verdict with the finding's case."""
    asks: bool = False
    """Whether the worker waits for `MayShrink`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """Message from the worker: a failed case is about to run again in its own process, or that run is done."""

    verdict: CaseVerdict | None
    """Verdict to be confirmed; None once it is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Message from the worker: answer to `CheckOne`."""

    verdict: CaseVerdict
    """Verdict on the case."""
    seconds: float
    """Duration of the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Message from the worker: the checker raised an exception."""

    summary: str
    """Error as ``Type: message`` on one line."""
    trace: str
    """Traceback, and the case if one was being checked."""
    is_usage: bool = False
    """Whether it was a `UsageError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Message from the worker: the control's result."""

    name: str
    """The planted fault."""
    wrong: str
    """The mistake, in one sentence."""
    examples: int = 0
    """Cases checked with the fault, including the one that caught it."""
    seconds: float = 0.0
    """Seconds spent on the control."""
    caught: bool = False
    """Whether the fault was caught. If not, a clean result of the campaign proves nothing."""
    passed_over: tuple[str, ...] = ()
    """Faults planted before this one and dropped, because no generated case showed them in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Last message from a worker that ends early, because a rank still runs in its process and cannot be stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Last message from the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Stands for a dead worker's last message: the process died, or was killed because it was stuck."""

    verdict: CaseVerdict | None
    """Verdict on the case it was checking; None if it had not begun a check."""
    seconds: float
    """Seconds since that check began."""
    printed: str
    """The process's last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """Stands for a worker's last message if its machine is lost."""

    name: str
    """The lost machine."""
    why: str
    """Reason in one line."""
