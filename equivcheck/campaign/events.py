"""Events that a campaign sends to its listeners, and the summary at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from equivcheck.campaign.findings.store import Kept
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.crew import Node
from equivcheck.campaign.workers.messages import Control, NodeLost
from equivcheck.oracle.verdict.verdict import CaseVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFinding:
    """A finding in this campaign, and whether its verdict was written to the store."""

    fingerprint: str
    """12 hex digits, equal for all verdicts with the same fault."""
    path: Path
    """The finding's folder. It does not exist if `kept` is `UNKEPT`."""
    verdict: CaseVerdict
    """Verdict on the smallest case with this fault in this campaign."""
    kept: Kept
    """Result of passing the verdict to the store. `SEEN`: the store already had a case that is no larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """How many checks one cluster machine did, and how long it took."""

    name: str
    """The machine's name."""
    num_workers: int
    """How many worker processes the machine can run; 0 if it never took part."""
    num_checks: int
    """How many checks the machine did."""
    seconds: float
    """Seconds from the campaign's start until now, or until the machine was lost."""
    lost: str = ""
    """Text ``lost: ...`` or ``left out: ...`` with the reason; empty while the machine takes part."""

    @property
    def rate(self) -> float:
        """Checks per second on this machine."""
        return self.num_checks / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Event: the campaign starts its workers."""

    plan: Plan
    """The campaign's plan."""
    nodes: tuple[NodeWork, ...] = ()
    """Cluster machines; empty if the campaign runs on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Event with the campaign's progress, sent several times a second."""

    seconds: float
    """Seconds of the budget spent so far; 0 while workers start."""
    tally: Tally
    """Counts of all checks so far. Listeners must not change it."""
    num_findings: int
    """Distinct findings so far."""
    nodes: tuple[NodeWork, ...] = ()
    """Each cluster machine's work so far; empty if the campaign runs on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A campaign's result."""

    plan: Plan
    """The campaign's plan."""
    seconds: float
    """Seconds from the first check to the end of the last worker."""
    tally: Tally
    """Counts over all checks."""
    findings: tuple[KeptFinding, ...]
    """The campaign's findings, oldest first."""
    store: Path
    """Folder with stored findings."""
    interrupted: bool = False
    """Whether a signal stopped the campaign before its budget was spent."""
    broken: str = ""
    """Error and traceback if the checker itself failed; empty if it did not."""
    unkept: str = ""
    """Reason why some findings are only in this summary; empty if the store has all findings."""
    control: Control | None = None
    """Result of the bug planted on purpose. None if none was planted, or if the campaign ended before a decision."""
    num_cut_off: int = 0
    """How many workers were stopped in the middle of a check, because the campaign was over."""
    nodes: tuple[NodeWork, ...] = ()
    """Each cluster machine's work; empty if the campaign ran on this machine."""

    @property
    def has_survivor(self) -> bool:
        """Whether no check caught the bug planted on purpose. A campaign without findings then proves nothing."""
        return self.control is not None and not self.control.caught


Event = Started | Ticked | KeptFinding | NodeLost | Summary
Listener = Callable[[Event], None]
"""Function called with events in the supervisor's thread. An exception from it ends the campaign."""


class NodeWorks:
    """Counts the checks on each cluster machine, and remembers lost machines."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._checks = Counter[str]()
        self._lost_at: dict[str, float] = {}

    def count(self, name: str, num_checks: int) -> None:
        """Add `num_checks` to the checks done on the machine called `name`."""
        self._checks[name] += num_checks

    def lose(self, name: str, seconds: float) -> bool:
        """Record that a machine was lost, `seconds` after the campaign's start. Returns False if this was recorded before."""
        is_news = name not in self._lost_at
        self._lost_at.setdefault(name, seconds)
        return is_news

    @property
    def all_lost(self) -> bool:
        """Whether all machines were lost."""
        return all(node.lost for node in self._nodes)

    def so_far(self, seconds: float) -> tuple[NodeWork, ...]:
        """Return each machine's work, `seconds` after the campaign's start."""
        return tuple(
            NodeWork(
                name=node.name,
                num_workers=node.num_workers,
                num_checks=self._checks[node.name],
                seconds=self._lost_at.get(node.name, seconds),
                lost=node.lost,
            )
            for node in self._nodes
        )
