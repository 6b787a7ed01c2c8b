"""Merges stores from several machines, with their findings and histories."""

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
    """Folder of the source store."""
    kept: Counter[Kept]
    """How many findings were new, better examples, or already there."""
    num_runs: int
    """How many campaigns were new in the history."""
    broken: tuple[str, ...] = ()
    """Folders without a valid finding, with reasons. They were left out."""


def require_sources(sources: Sequence[Path], into: Path) -> None:
    """Check the stores before a merge. Raises `UsageError` if a source does not exist, or is the destination `into`."""
    for source in sources:
        if not source.is_dir():
            raise UsageError(f"store {source} is not valid: no such folder. Expected a store's folder")
        if into.exists() and source.samefile(into):
            raise UsageError(f"store {source} is not valid: it is the destination. Expected a store other than the destination")


def merge(source: Path, into: Path) -> Merged:
    """Add the findings and the history in the store `source` to the store `into`.

    A second call adds nothing. Raises `StoreFailed` or `HistoryFailed` if a file cannot be written.
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
