"""Merges stores from several machines: findings and histories."""

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
"""Tables with one or more rows per run. The first table holds the runs themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of merging one store into another."""

    store: Path
    """The merged store's folder."""
    kept: Counter[Kept]
    """Number of findings that were new, smaller, or seen before."""
    num_runs: int
    """How many runs are new to the history."""
    broken: tuple[str, ...] = ()
    """Invalid finding folders, with reasons. Such folders are left out."""


def require_sources(sources: Sequence[Path], into: Path) -> None:
    """Check the stores before merging. Raises `UsageError` if a store does not exist, or is the destination."""
    for source in sources:
        if not source.is_dir():
            raise UsageError(f"store {source} is not valid: no such folder. Expected a store's folder")
        if into.exists() and source.samefile(into):
            raise UsageError(f"store {source} is not valid: it is the destination. Expected a store other than the destination")


def merge(source: Path, into: Path) -> Merged:
    """Add a store's findings and history to another store.

    A second call adds nothing. Raises the errors of the store and the history.
    """
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
    """Delete a run merged before its end, so that it can be merged again."""
    if ours.execute("SELECT 1 FROM run WHERE id = ? AND ended = ''", (run,)).fetchone():
        for table in _OF_RUNS:
            ours.execute(f"DELETE FROM {table} WHERE {'id' if table == 'run' else 'run'} = ?", (run,))


def _num_runs(db: sqlite3.Connection) -> int:
    (number,) = db.execute("SELECT COUNT(*) FROM run").fetchone()
    return int(number)
