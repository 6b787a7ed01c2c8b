"""Reads and writes the history file. A campaign writes while it runs, so a killed campaign leaves its counts."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.history.run import Ended, Run
from equivcheck.errors import EquivCheckError
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome
from equivcheck.system.choice import PrintableEnum

FILE = "history.sqlite"
"""File name in the store's folder."""
_SCHEMA = 2
_SINCE_FIRST = {1: "ALTER TABLE run ADD COLUMN fail_on TEXT NOT NULL DEFAULT 'all'"}
"""SQL statements to upgrade the database, one per schema version."""
_LOCK_SECONDS = 30.0
"""Seconds to wait for another writer. Each writer holds the lock for a few milliseconds."""


class HistoryFailed(EquivCheckError):
    """The history file cannot be read or written. The text names the file. Findings are not affected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A campaign's progress in numbers."""

    seconds: float
    """Seconds since the campaign's first check."""
    checks: int
    """How many checks ran. Shrinking, and checks ignoring torch's limits, do not count."""
    pairs: int
    """How many legal feature pairs the checked scenarios had."""
    of_pairs: int
    """How many legal feature pairs there are."""
    num_findings: int
    """How many distinct findings the campaign has."""
    outcomes: Mapping[tuple[str, Outcome], int]
    """How many checks there were for each layout name and outcome."""
    costs: Mapping[str, float]
    """Seconds spent on checks, by layout name."""


class History:
    """All campaigns with one store, in an SQLite file. Each method is one transaction."""

    def __init__(self, store: Path) -> None:
        self.path = store / FILE

    def begin(self, run: Run) -> None:
        """Add a campaign to the history. Does nothing if it is already there, for example because it was added with a finding."""
        names = ", ".join(field.name for field in fields(Run))
        values = [value.value if isinstance(value, PrintableEnum) else value for value in astuple(run)]
        with self.open() as db:
            db.execute(f"INSERT OR IGNORE INTO run ({names}) VALUES ({', '.join('?' * len(values))})", values)

    def note(self, run: Run, figures: Figures) -> None:
        """Write a campaign's progress."""
        with self.open() as db:
            now = (figures.seconds, figures.checks, figures.pairs)
            db.execute(
                "UPDATE run SET seconds = ?, checks = ?, pairs = ?, of_pairs = ? WHERE id = ?", (*now, figures.of_pairs, run.id)
            )
            db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?, ?, ?)", (run.id, *now, figures.num_findings))
            outcomes = [(run.id, layout, outcome.value, number) for (layout, outcome), number in figures.outcomes.items()]
            db.executemany("INSERT OR REPLACE INTO outcome VALUES (?, ?, ?, ?)", outcomes)
            costs = [(run.id, layout, seconds) for layout, seconds in figures.costs.items()]
            db.executemany("INSERT OR REPLACE INTO cost VALUES (?, ?, ?)", costs)

    def see(self, run: Run, fingerprint: str, kept: CaseVerdict, seen: Recheck = Recheck.SHOWS) -> None:
        """Record in the history whether a finding's case failed in a campaign. `seen` says whether and how it failed.

        `kept` is the stored verdict on the finding. A recorded `SHOWS` is final: later calls for the same finding and campaign do
        not change it.
        """
        row = (fingerprint, kept.case.name, kept.outcome.value, kept.reason)
        with self.open() as db:
            db.execute("INSERT OR REPLACE INTO finding VALUES (?, ?, ?, ?)", row)
            sighting = {"run": run.id, "mark": fingerprint, "seen": seen.value, "shows": Recheck.SHOWS.value}
            db.execute(
                "INSERT INTO sighting VALUES (:run, :mark, :seen)"
                " ON CONFLICT DO UPDATE SET seen = excluded.seen WHERE seen != :shows",
                sighting,
            )

    def end(self, run: Run, ended: Ended) -> None:
        """Write how a campaign ended."""
        with self.open() as db:
            db.execute("UPDATE run SET ended = ? WHERE id = ?", (ended.value, run.id))

    def summarize(self, run: Run, values: Mapping[str, Any]) -> None:
        """Write a campaign's summary, as JSON values."""
        with self.open() as db:
            db.execute("INSERT OR REPLACE INTO summary VALUES (?, ?)", (run.id, json.dumps(values, allow_nan=False)))

    def fingerprints(self) -> frozenset[str]:
        """Return the fingerprints of all findings in the history."""
        if not self.path.exists():
            return frozenset()
        with self.open(writes=False) as db:
            return frozenset(row["fingerprint"] for row in db.execute("SELECT fingerprint FROM finding"))

    @contextlib.contextmanager
    def open(self, *, writes: bool = True) -> Iterator[sqlite3.Connection]:
        """Open the history file in one transaction. Raises `HistoryFailed` if the file cannot be used.

        If `writes` is True, a missing file is created. Otherwise, the file must exist; it may be write-protected, and readers do
        not wait for writers.
        """
        try:
            if writes:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self.path, timeout=_LOCK_SECONDS, isolation_level=None)) as db:
                db.row_factory = sqlite3.Row
                db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                _require_schema(db)
                yield db
                db.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            raise HistoryFailed(f"the history {self.path} cannot be used: {error}") from error


def _require_schema(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == _SCHEMA:
        return
    if version > _SCHEMA:
        raise sqlite3.DatabaseError(
            f"its schema {version} comes from a newer equivcheck. Upgrade equivcheck, or use another store"
        )
    statements = files(__package__).joinpath("schema.sql").read_text("utf-8").split(";\n")
    for statement in [_SINCE_FIRST[old] for old in range(version, _SCHEMA)] if version else statements:
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {_SCHEMA}")
