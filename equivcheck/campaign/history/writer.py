"""Listener that writes a campaign to the history while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from equivcheck.campaign.events import Event, KeptFinding, Summary, Ticked
from equivcheck.campaign.findings.fate import ReplayedFinding, compare_recheck
from equivcheck.campaign.findings.finding import BrokenFinding
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.history.history import Figures, History, HistoryFailed
from equivcheck.campaign.history.run import Ended, Run
from equivcheck.campaign.tally import Tally

_SECONDS = 10.0
"""Campaign seconds between two notes."""


class HistoryWriter:
    """Writes a campaign's events to the history.

    A write error does not end the campaign. Then `failed` has the reason, and later events are not written.
    """

    def __init__(self, store: FindingStore, run: Run) -> None:
        """Add the run, after stored findings missing in the history. Raises `HistoryFailed`."""
        self.run, self.failed = run, ""
        self._history, self._noted = History(store.path), 0.0
        _enter_kept(self._history, store)
        self._history.begin(run)

    def __call__(self, event: Event) -> None:
        """Write one campaign event to the history."""
        self._guarded(lambda: self._write(event))

    def replayed(self, replayed: ReplayedFinding) -> None:
        """Write the result of checking a stored finding again."""
        kept = replayed.finding
        seen = compare_recheck(kept.verdict, replayed.verdict)
        self._guarded(lambda: self._history.see(self.run, kept.fingerprint, kept.verdict, seen))

    def summarized(self, values: Mapping[str, Any]) -> None:
        """Write the campaign's summary, as JSON values."""
        self._guarded(lambda: self._history.summarize(self.run, values))

    def _guarded(self, write: Callable[[], None]) -> None:
        if not self.failed:
            try:
                write()
            except HistoryFailed as error:
                self.failed = str(error)

    def _write(self, event: Event) -> None:
        if isinstance(event, KeptFinding):
            self._history.see(self.run, event.fingerprint, event.verdict)
        elif isinstance(event, Ticked) and event.seconds >= self._noted + _SECONDS:
            self._noted = event.seconds
            self._history.note(self.run, figures(event.seconds, event.tally, event.num_findings))
        elif isinstance(event, Summary):
            self._history.note(self.run, figures(event.seconds, event.tally, len(event.findings)))
            self._history.end(self.run, _ended(event))


def _enter_kept(history: History, store: FindingStore) -> None:
    """Add findings that were kept without a history, each with its own run."""
    known = history.fingerprints()
    for mark in store.fingerprints():
        if mark in known:
            continue
        with contextlib.suppress(BrokenFinding):
            found = store.load(mark)
            where = found.environment
            run = Run(
                id=f"found {mark}",
                began=where.date,
                seed=None,
                torch=where.torch,
                torch_commit="",
                equivcheck=where.equivcheck,
                revision="",
                platform=where.platform,
            )
            history.begin(run)
            history.see(run, mark, found.verdict)
            history.end(run, Ended.FINISHED)


def figures(seconds: float, tally: Tally, num_findings: int) -> Figures:
    """Compute a campaign's progress from its counts. `seconds` is the time since its first check."""
    return Figures(
        seconds=round(seconds, 3),
        checks=tally.num_checks,
        pairs=tally.reach.drawn_pairs.count,
        of_pairs=tally.reach.legal.count,
        num_findings=num_findings,
        outcomes=tally.outcomes,
        costs={layout: durations.total for layout, durations in tally.durations.items()},
    )


def _ended(summary: Summary) -> Ended:
    if summary.broken:
        return Ended.BROKEN
    return Ended.INTERRUPTED if summary.interrupted else Ended.FINISHED
