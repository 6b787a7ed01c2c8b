"""Prints a campaign's progress: a live line on a terminal, occasional lines elsewhere, and one for each cluster machine."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from equivcheck.campaign.events import Event, Started, Ticked
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.workers.messages import NodeLost
from equivcheck.report.campaign.node_text import node_lines, node_summary
from equivcheck.scenario.scenario import count
from equivcheck.system.printable import escape_unprintable

_QUIET_SECONDS = 20.0
"""Seconds between two lines without a terminal."""


class ProgressLine:
    """Listener for a campaign that prints its progress. Enter it as a context around the campaign."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._plan: Plan | None = None
        self._printed_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, Started):
            self._plan = event.plan
            self._start(event)
        elif isinstance(event, NodeLost):
            self._say(f"node {event.name}: lost: {escape_unprintable(event.why)}", style="yellow")
        elif isinstance(event, Ticked) and self._plan is not None:
            self._tick(event, self._plan)

    def _start(self, event: Started) -> None:
        used = [node for node in event.nodes if not node.lost]
        where = f" on {count(len(used), 'node')}" if event.nodes else ""
        processes = count(event.plan.num_workers, "process", "processes")
        self._say(f"comparing generated cases with the single-device run: {processes}{where}, seed {event.plan.seed}")
        for node in event.nodes:
            if node.lost:
                self._say(node_summary(node), style="yellow")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _tick(self, event: Ticked, plan: Plan) -> None:
        lines = [progress_text(event, plan), *(node_lines(event.nodes) if event.seconds else ())]
        if self._live is not None:
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._printed_at >= _QUIET_SECONDS:
            self._printed_at = time.monotonic()
            self._say("\n  ".join(lines))


def progress_text(event: Ticked, plan: Plan) -> str:
    """Return the progress line with at most 80 columns: time left, checks, findings, and checks with a known problem."""
    if not event.seconds:
        return "starting"
    checks = event.tally.num_checks
    parts = [
        _left(event, plan),
        count(checks, "check") if plan.num_checks is None else f"{checks:,}/{plan.num_checks:,} checks",
        count(event.num_findings, "finding"),
        f"{event.tally.known.total():,} known",
    ]
    return " | ".join(parts)


def _left(event: Ticked, plan: Plan) -> str:
    """Return words for the time left, from the time limit and the rate of checks.

    After that time, running checks, shrinking and the control still finish.
    """
    seconds = plan.seconds - event.seconds
    if plan.num_checks is not None and event.tally.num_checks:
        missing = plan.num_checks - event.tally.num_checks
        seconds = min(seconds, missing * event.seconds / event.tally.num_checks)
    return f"{duration_in_words(seconds)} left" if seconds > 0 else "finishing"


def duration_in_words(seconds: float) -> str:
    """Format a duration: ``47 s``, ``12:05`` minutes or ``3:00:00`` hours; ``?`` if unknown."""
    if seconds == math.inf:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
