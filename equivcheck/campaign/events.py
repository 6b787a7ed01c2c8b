"""What a campaign tells its listeners, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equivcheck.campaign.counts.tally import Tally
from equivcheck.campaign.findings.store import Kept
from equivcheck.campaign.messages import Control, NodeLost
from equivcheck.campaign.plan import Plan
from equivcheck.oracle.verdict.verdict import CaseVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFinding:
    """A finding of this campaign."""

    fingerprint: str
    """The same for equal faults."""
    path: Path
    """Its folder, which is not there if it is `UNKEPT`."""
    verdict: CaseVerdict
    """With the smallest case of this campaign that shows it."""
    kept: Kept
    """What the store did with it; `SEEN` if an earlier campaign left an example no larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """What one machine of several has done."""

    name: str
    """The machine's."""
    num_workers: int
    """Worker processes that it has room for; 0 if it never took part."""
    num_checks: int
    """Checks that it has done."""
    seconds: float
    """Of the campaign's time, until now or until it was lost."""
    lost: str = ""
    """``lost: ...`` or ``left out: ...`` with the reason; empty while it takes part."""

    @property
    def rate(self) -> float:
        """Checks a second."""
        return self.num_checks / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The workers are being started."""

    plan: Plan
    """What is to be done."""
    nodes: tuple[NodeWork, ...] = ()
    """Machines that they are started on; empty for this one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Several times a second: where the campaign is."""

    seconds: float
    """Time spent of the budget; 0 while workers start."""
    tally: Tally
    """What came of all checks so far; not to be changed."""
    num_findings: int
    """Distinct findings so far."""
    nodes: tuple[NodeWork, ...] = ()
    """What each machine has done; empty for this one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a campaign leaves."""

    plan: Plan
    """What was to be done."""
    seconds: float
    """Time from the start of the first worker's checks to the end of the last one's."""
    tally: Tally
    """What came of all checks."""
    findings: tuple[KeptFinding, ...]
    """In the order in which they were found."""
    store: Path
    """Folder of the findings."""
    interrupted: bool = False
    """Whether it was stopped before its budget was spent."""
    broken: str = ""
    """Why the checker itself could not go on, with a traceback; empty if it could."""
    unkept: str = ""
    """Why some findings are nowhere but here; empty if all were kept."""
    control: Control | None = None
    """What came of the fault that was to be caught; None where there was none, or the end came before it was known."""
    num_cut_off: int = 0
    """Workers that were stopped in the middle of a check, as it went on longer than the campaign."""
    nodes: tuple[NodeWork, ...] = ()
    """What each machine has done; empty for this one alone."""

    @property
    def has_survivor(self) -> bool:
        """Whether the control was not caught, so that a clean result proves nothing."""
        return self.control is not None and not self.control.caught


Event = Started | Ticked | KeptFinding | NodeLost | Summary
Listener = Callable[[Event], None]
"""Called in the supervisor's thread; what it raises ends the campaign."""
