"""Stores of several machines made one: their findings, and the runs of their histories."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from equivcheck.campaign.findings.finding import BrokenFinding
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.campaign.history.history import History
from equivcheck.errors import UsageError

_OF_RUNS = ("run", "outcome", "cost", "progress", "summary", "sighting")
"""Tables whose rows belong to a run; the first is that of the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What came out of one store."""

    store: Path
    """Its folder."""
    kept: Counter[Kept]
    """How many of its findings were new, smaller than what was there, or seen before."""
    num_runs: int
    """Runs that were not in the history yet."""
    broken: tuple[str, ...] = ()
    """Folders that are no finding any more, and why; they are left out."""


def require_sources(sources: Sequence[Path], into: Path) -> None:
    """Raise `UsageError`, before anything is merged, for a store that is not there or is the one to merge into."""
    for source in sources:
        if not source.is_dir():
            raise UsageError(f"{source} is no folder; allowed: the folder of a store")
        if into.exists() and source.samefile(into):
            raise UsageError(f"{source} is the store to merge into; allowed: other stores")


def merge(source: Path, into: Path) -> Merged:
    """Add what a store has to another one; done twice, it adds nothing. Raises what the store and the history raise."""
    kept, broken = Counter[Kept](), []
    for mark in FindingStore(source).fingerprints():
        try:
            kept[FindingStore(into).take(FindingStore(source).load(mark))] += 1
        except BrokenFinding as error:
            broken.append(str(error))
    return Merged(store=source, kept=kept, num_runs=_merge_runs(source, into), broken=tuple(broken))


def _merge_runs(source: Path, into: Path) -> int:
    other = History(source)
    if not other.path.exists():
        return 0
    with other.open(writes=False) as theirs, History(into).open() as ours:
        before = _num_runs(ours)
        _copy(theirs, ours, "finding", "INSERT OR IGNORE")
        for run in theirs.execute("SELECT id FROM run WHERE ended != ''").fetchall():
            _forget_unended(ours, run["id"])
        for table in _OF_RUNS:
            _copy(theirs, ours, table, "INSERT OR IGNORE")
        for row in theirs.execute("SELECT * FROM acceptance").fetchall():
            longer = "ON CONFLICT DO UPDATE SET reason = excluded.reason, until = excluded.until WHERE excluded.until > until"
            ours.execute(f"INSERT INTO acceptance VALUES (?, ?, ?) {longer}", tuple(row))
        return _num_runs(ours) - before


def _copy(theirs: sqlite3.Connection, ours: sqlite3.Connection, table: str, insert: str) -> None:
    for row in theirs.execute(f"SELECT * FROM {table}"):
        ours.execute(f"{insert} INTO {table} VALUES ({', '.join('?' * len(row))})", tuple(row))


def _forget_unended(ours: sqlite3.Connection, run: str) -> None:
    """Make room for a run that had not ended when it was merged before."""
    if ours.execute("SELECT 1 FROM run WHERE id = ? AND ended = ''", (run,)).fetchone():
        for table in _OF_RUNS:
            ours.execute(f"DELETE FROM {table} WHERE {'id' if table == 'run' else 'run'} = ?", (run,))


def _num_runs(db: sqlite3.Connection) -> int:
    (number,) = db.execute("SELECT COUNT(*) FROM run").fetchone()
    return int(number)
