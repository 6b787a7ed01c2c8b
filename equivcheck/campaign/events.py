"""What a campaign tells its listeners, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equivcheck.campaign.messages import Control
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.findings.store import Kept
from equivcheck.verdict.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFinding:
    """A finding of this campaign."""

    fingerprint: str
    """The same for equal faults."""
    path: Path
    """Its folder, which is not there if it is `UNKEPT`."""
    verdict: Verdict
    """With the smallest scenario of this campaign that shows it."""
    kept: Kept
    """What the store did with it; `SEEN` if an earlier campaign left an example no larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The workers are being started."""

    plan: Plan
    """What is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Several times a second: where the campaign is."""

    seconds: float
    """Time spent of the budget; 0 while workers start."""
    tally: Tally
    """What came of all checks so far; not to be changed."""
    num_findings: int
    """Distinct findings so far."""


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
    """What came of the wrong training that was to be caught; None where there was none, or the end came before it was known."""

    @property
    def has_survivor(self) -> bool:
        """Whether the control was not caught, so that a clean result proves nothing."""
        return self.control is not None and not self.control.caught


Event = Started | Ticked | KeptFinding | Summary
Listener = Callable[[Event], None]
"""Called in the supervisor's thread; what it raises ends the campaign."""
