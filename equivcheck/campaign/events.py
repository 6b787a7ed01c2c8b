"""Events of a campaign for its listeners, and its summary."""

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
    """Equal for equal faults."""
    path: Path
    """Folder of the finding; it does not exist if `kept` is `UNKEPT`."""
    verdict: CaseVerdict
    """Verdict on the campaign's smallest case with this fault."""
    kept: Kept
    """What the store did with it; `SEEN` if an earlier campaign left a case that is no larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """Work of one machine of a cluster."""

    name: str
    """Name of the machine."""
    num_workers: int
    """Worker processes that it has room for; 0 if it never took part."""
    num_checks: int
    """Number of checks."""
    seconds: float
    """Seconds of the campaign until now, or until the machine was lost."""
    lost: str = ""
    """``lost: ...`` or ``left out: ...`` with the reason; empty while it takes part."""

    @property
    def rate(self) -> float:
        """Checks per second."""
        return self.num_checks / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The campaign starts its workers."""

    plan: Plan
    """Plan of the campaign."""
    nodes: tuple[NodeWork, ...] = ()
    """Machines of the cluster; empty for this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Progress, sent several times a second."""

    seconds: float
    """Seconds of the budget spent so far; 0 while workers start."""
    tally: Tally
    """Counts of all checks so far. Listeners must not change it."""
    num_findings: int
    """Distinct findings so far."""
    nodes: tuple[NodeWork, ...] = ()
    """Work of each machine; empty for this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Result of a campaign."""

    plan: Plan
    """Plan of the campaign."""
    seconds: float
    """Seconds from the first check to the end of the last worker."""
    tally: Tally
    """Counts of all checks."""
    findings: tuple[KeptFinding, ...]
    """Findings in the order of discovery."""
    store: Path
    """Folder of the findings."""
    interrupted: bool = False
    """Whether a signal stopped it before its budget was spent."""
    broken: str = ""
    """Error and traceback that ended the checker itself; empty if there was none."""
    unkept: str = ""
    """Reason why some findings are only in this summary; empty if the store has all."""
    control: Control | None = None
    """Result of the control. None if there was none, or the campaign ended before it was decided."""
    num_cut_off: int = 0
    """Workers that were stopped in the middle of a check, because the campaign was over."""
    nodes: tuple[NodeWork, ...] = ()
    """Work of each machine; empty for this machine."""

    @property
    def has_survivor(self) -> bool:
        """Whether the control was not caught. A clean result then proves nothing."""
        return self.control is not None and not self.control.caught


Event = Started | Ticked | KeptFinding | NodeLost | Summary
Listener = Callable[[Event], None]
"""Called in the supervisor's thread. An exception from it ends the campaign."""
