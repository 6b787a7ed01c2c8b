"""How findings stand over all runs: new, still there, fixed, back again; and which are accepted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from equivcheck.campaign.findings.again import Again
from equivcheck.campaign.history.history import History
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.choice import Choice

ALWAYS = "9999"
"""Later than any run began."""


class Standing(Choice):
    """How a finding stands after the last run that told of it."""

    NEW = "new"
    """It showed there for the first time."""
    STILL = "still there"
    """It showed there, and in the run before that told of it."""
    BACK = "back again"
    """It showed there, and not in the run before that told of it, though in an earlier one."""
    FIXED = "fixed"
    """It did not show there."""
    ON_FILE = "on file"
    """It showed there as a known issue."""

    @property
    def shows(self) -> bool:
        """Whether it is still to be looked at."""
        return self in (Standing.NEW, Standing.STILL, Standing.BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Where a finding was seen."""

    run: str
    """Identifier of the run."""
    began: str
    """When that run began, in UTC."""
    torch: str
    """Version of torch."""
    torch_commit: str
    """Commit that torch was built from; may be empty."""
    revision: str
    """Commit of the repository in which it ran; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Somebody's decision that a finding is no reason to fail, for some time."""

    reason: str
    """Why."""
    until: str
    """The last day on which it holds, as ``2026-01-31``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a finding over all runs."""

    fingerprint: str
    """Of the finding."""
    name: str
    """Of its scenario."""
    outcome: Outcome
    """What its check said."""
    reason: str
    """Why."""
    standing: Standing
    """How it stands."""
    first: Sighting
    """Where it showed first."""
    last: Sighting
    """Where it showed last."""
    told: str
    """Identifier of the last run that told of it."""
    accepted: Acceptance | None
    """By whom it is silenced; None if by nobody, or no longer."""

    @property
    def is_open(self) -> bool:
        """Whether it shows, and nobody has accepted it."""
        return self.standing.shows and self.accepted is None


def records(history: History, until: str = ALWAYS) -> tuple[Record, ...]:
    """Of every finding that showed in any run that began until then: those that came last first."""
    if not history.path.exists():
        return ()
    with history.open(writes=False) as db:
        rows = db.execute("SELECT * FROM finding ORDER BY fingerprint").fetchall()
        found = [record for row in rows if (record := _record(db, row, until)) is not None]
    return tuple(sorted(found, key=lambda record: record.first.began, reverse=True))


def accept(history: History, fingerprint: str, reason: str, until: date) -> None:
    """Silence a finding up to a day, that included. Raises `UsageError` for a day that is over, or without a reason."""
    if until < _today():
        raise UsageError(f"the last day is {until}; allowed: {_today()} or later")
    if not reason.strip():
        raise UsageError("the reason is empty; allowed: why the finding is no reason to fail")
    with history.open() as db:
        db.execute("INSERT OR REPLACE INTO acceptance VALUES (?, ?, ?)", (fingerprint, reason.strip(), until.isoformat()))


def withdraw(history: History, fingerprint: str) -> None:
    """Let a finding count again."""
    with history.open() as db:
        db.execute("DELETE FROM acceptance WHERE fingerprint = ?", (fingerprint,))


def _record(db: sqlite3.Connection, row: sqlite3.Row, until: str) -> Record | None:
    seen = db.execute(
        "SELECT run.*, sighting.seen FROM sighting JOIN run ON run.id = sighting.run"
        " WHERE fingerprint = ? AND run.began <= ? ORDER BY run.began, run.id",
        (row["fingerprint"], until),
    ).fetchall()
    telling = [(run, Again(run["seen"])) for run in seen if Again(run["seen"]) is not Again.UNTOLD]
    shown = [run for run, again in telling if again in _SHOWS]
    if not shown:
        return None
    return Record(
        fingerprint=row["fingerprint"],
        name=row["name"],
        outcome=Outcome(row["outcome"]),
        reason=row["reason"],
        standing=_standing([again for _, again in telling]),
        first=_sighting(shown[0]),
        last=_sighting(shown[-1]),
        told=telling[-1][0]["id"],
        accepted=next(_acceptances(db, row["fingerprint"]), None),
    )


_SHOWS = (Again.SHOWS, Again.DIFFERENTLY)
"""What fails in another way is not fixed."""


def _standing(told: Sequence[Again]) -> Standing:
    if told[-1] not in _SHOWS:
        return Standing.ON_FILE if told[-1] is Again.KNOWN else Standing.FIXED
    if not any(again in _SHOWS for again in told[:-1]):
        return Standing.NEW
    return Standing.STILL if told[-2] in _SHOWS else Standing.BACK


def _sighting(run: sqlite3.Row) -> Sighting:
    return Sighting(
        run=run["id"], began=run["began"], torch=run["torch"], torch_commit=run["torch_commit"], revision=run["revision"]
    )


def _acceptances(db: sqlite3.Connection, fingerprint: str) -> Iterator[Acceptance]:
    for row in db.execute("SELECT * FROM acceptance WHERE fingerprint = ?", (fingerprint,)):
        if row["until"] >= _today().isoformat():
            yield Acceptance(reason=row["reason"], until=row["until"])


def _today() -> date:
    return datetime.now(UTC).date()
