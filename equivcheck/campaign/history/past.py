"""Reads earlier campaigns from the history."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.run import Ended, FailOn, Mode, Run
from equivcheck.campaign.history.standing import ALWAYS
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome

_RUNS = (
    "SELECT run.*, (SELECT COUNT(*) FROM sighting WHERE sighting.run = run.id AND seen IN (?, ?)) AS findings"
    " FROM run WHERE seed IS NOT NULL AND began <= ? ORDER BY began DESC, id DESC"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """An earlier campaign, with the last counts that it wrote to the history."""

    run: Run
    """Facts about the campaign, known at its start."""
    ended: Ended | None
    """How the campaign ended; None if it still runs or was killed."""
    seconds: float
    """Seconds since the campaign's first check."""
    checks: int
    """How many checks ran. Shrinking, and checks ignoring torch's limits, do not count."""
    pairs: int
    """How many legal feature pairs the checked scenarios had."""
    of_pairs: int
    """How many legal feature pairs there are; 0 if the campaign wrote no progress."""
    num_findings: int
    """How many findings showed in the campaign."""

    @property
    def rate(self) -> float:
        """Checks per second in this campaign."""
        return self.checks / self.seconds if self.seconds else 0.0

    @property
    def share(self) -> float:
        """Share of the legal feature pairs that checked scenarios had, from 0 to 1."""
        return self.pairs / max(1, self.of_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Details about a campaign, as it wrote them to the history."""

    outcomes: Mapping[tuple[str, Outcome], int]
    """How many checks there were for each layout name and outcome."""
    costs: Mapping[str, float]
    """Seconds spent on checks, by layout name."""
    progress: tuple[tuple[float, int, int], ...]
    """Seconds, checks and feature pairs, each time the campaign wrote its progress."""
    summary: Mapping[str, Any] | None
    """The campaign's summary as JSON values; None if it was killed."""


def past_runs(history: History, until: str = ALWAYS) -> Iterator[PastRun]:
    """Yield the campaigns begun up to `until`, latest first.

    Campaigns without counts are left out. These are in the history only because it has one of their findings.
    """
    if not history.path.exists():
        return
    with history.open(writes=False) as db:
        rows = db.execute(_RUNS, (Recheck.SHOWS.value, Recheck.DIFFERENTLY.value, until)).fetchall()
    yield from map(_past_run, rows)


def find_run(history: History, prefix: str = "") -> PastRun:
    """Return the campaign whose id begins with `prefix`, or the latest one if `prefix` is empty.

    Raises `UsageError` if no campaign matches, or more than one.
    """
    runs = list(past_runs(history))
    if not runs:
        raise UsageError(f"the history {history.path} has no run. Expected a store that `equivcheck fuzz` has used")
    matches = [past for past in runs if past.run.id.startswith(prefix)] if prefix else runs[:1]
    if len(matches) == 1:
        return matches[0]
    several = f"ids of {len(matches)} runs in {history.path} begin with it"
    why = several if matches else f"no run in {history.path} has an id that begins with it"
    there = ", ".join(past.run.id for past in matches or runs[:10])
    raise UsageError(f"run {prefix!r} is not valid: {why}. Expected an id, or the beginning of one: {there}")


def run_details(history: History, run: Run) -> Noted:
    """Return a campaign's details in the history."""
    with history.open(writes=False) as db:
        outcomes = db.execute("SELECT layout, outcome, checks FROM outcome WHERE run = ?", (run.id,)).fetchall()
        costs = db.execute("SELECT layout, seconds FROM cost WHERE run = ?", (run.id,)).fetchall()
        progress = db.execute("SELECT seconds, checks, pairs FROM progress WHERE run = ? ORDER BY seconds", (run.id,)).fetchall()
        summary = db.execute("SELECT json FROM summary WHERE run = ?", (run.id,)).fetchone()
    return Noted(
        outcomes={(layout, Outcome(outcome)): checks for layout, outcome, checks in outcomes},
        costs=dict(costs),
        progress=tuple((seconds, checks, pairs) for seconds, checks, pairs in progress),
        summary=None if summary is None else json.loads(summary["json"]),
    )


def _past_run(row: sqlite3.Row) -> PastRun:
    known = {field.name: row[field.name] for field in fields(Run)}
    return PastRun(
        run=Run(**known | {"mode": Mode(row["mode"]), "fail_on": FailOn(row["fail_on"])}),
        ended=Ended(row["ended"]) if row["ended"] else None,
        seconds=row["seconds"],
        checks=row["checks"],
        pairs=row["pairs"],
        of_pairs=row["of_pairs"],
        num_findings=row["findings"],
    )
