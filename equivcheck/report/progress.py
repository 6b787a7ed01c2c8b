"""How a running campaign is going: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from equivcheck.campaign.events import Event, KeptFinding, Started, Ticked
from equivcheck.campaign.plan import Plan
from equivcheck.scenario.scenario import count, in_words
from equivcheck.verdict.verdict import Outcome

_QUIET_SECONDS = 10.0
"""Between two lines where there is no terminal."""


class ProgressLine:
    """Listens to a campaign and writes to a console; enter it around the campaign."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._plan: Plan | None = None
        self._said = time.monotonic()

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
            self._say(f"starting {count(event.plan.num_workers, 'worker')}, world {event.plan.world}, seed {event.plan.seed}")
        elif isinstance(event, KeptFinding):
            verdict = event.verdict
            self._say(f"{verdict.outcome.value} {event.fingerprint}: {in_words(verdict.scenario)}", style="red")
        elif isinstance(event, Ticked) and self._plan is not None:
            self._tick(event, self._plan)

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _tick(self, event: Ticked, plan: Plan) -> None:
        line = progress_text(event, plan)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            self._say(line)


def progress_text(event: Ticked, plan: Plan) -> str:
    """One line: time, checks, rate, findings, and what is neither fine nor a finding."""
    if not event.seconds:
        return "starting"
    checks = event.tally.num_checks
    parts = [
        f"{event.seconds:.0f} s" if plan.seconds == math.inf else f"{min(event.seconds, plan.seconds):.0f}/{plan.seconds:.0f} s",
        count(checks, "check") if plan.num_checks is None else f"{checks}/{plan.num_checks} checks",
        f"{checks / event.seconds:.0f} checks/s",
        count(event.num_findings, "finding"),
    ]
    for outcome in (Outcome.KNOWN, Outcome.INCONCLUSIVE, Outcome.UNSUPPORTED):
        number = sum(times for (_, other), times in event.tally.outcomes.items() if other is outcome)
        parts += [f"{number} {outcome.value}"] if number else []
    return " | ".join(parts)
