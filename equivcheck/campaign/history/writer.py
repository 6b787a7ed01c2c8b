"""Listens to a campaign, and writes its history while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from equivcheck.campaign.counts.tally import Tally
from equivcheck.campaign.events import Event, KeptFinding, Summary, Ticked
from equivcheck.campaign.findings.again import again
from equivcheck.campaign.findings.fate import Replayed
from equivcheck.campaign.findings.finding import BrokenFinding
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.history.history import Figures, History, HistoryFailed
from equivcheck.campaign.history.run import Ended, Run

_SECONDS = 10.0
"""Of a campaign, between two notes of how far it is."""


class HistoryWriter:
    """One run's entries. What cannot be written ends no campaign: `failed` says why, and nothing more is written."""

    def __init__(self, store: FindingStore, run: Run) -> None:
        """Enters the run, after what the store has and its history does not; raises `HistoryFailed`."""
        self.run, self.failed = run, ""
        self._history, self._noted = History(store.path), 0.0
        _enter_kept(self._history, store)
        self._history.begin(run)

    def __call__(self, event: Event) -> None:
        """Write what an event says."""
        self._guarded(lambda: self._write(event))

    def replayed(self, replayed: Replayed) -> None:
        """Enter what became of a finding."""
        kept = replayed.finding
        seen = again(kept.verdict, replayed.verdict)
        self._guarded(lambda: self._history.see(self.run, kept.fingerprint, kept.verdict, seen))

    def summarized(self, values: Mapping[str, Any]) -> None:
        """Enter what the run leaves, as JSON values."""
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
    """Enter findings that were kept without a history, each with a run of which that is all that is known."""
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
    """How far a campaign has come."""
    return Figures(
        seconds=round(seconds, 3),
        checks=tally.num_checks,
        pairs=tally.reach.drawn.count,
        of_pairs=tally.reach.legal.count,
        num_findings=num_findings,
        outcomes=tally.outcomes,
        costs={layout: durations.total for layout, durations in tally.durations.items()},
    )


def _ended(summary: Summary) -> Ended:
    if summary.broken:
        return Ended.BROKEN
    return Ended.INTERRUPTED if summary.interrupted else Ended.FINISHED
