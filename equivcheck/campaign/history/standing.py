"""Status of each finding over all campaigns, such as new or fixed, and the findings that make a campaign fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.run import FailOn, Mode, Run
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.nouns import TensorProgram
from equivcheck.system.choice import PrintableEnum

ALWAYS = "9999"
"""Date after any run's start, to select all runs."""


class Standing(PrintableEnum):
    """Status of a finding after the last campaign with a definite answer about it."""

    NEW = "new"
    """The finding showed for the first time."""
    STILL = "still there"
    """The finding showed in the last deciding run and in the one before."""
    BACK = "back again"
    """The finding showed in the last deciding run and in an earlier run, but not in a run between them."""
    FIXED = "fixed"
    """The finding did not show."""
    ON_FILE = "on file"
    """The finding showed, but is now explained by a known issue."""

    @property
    def shows(self) -> bool:
        """Whether the finding still shows, and no known issue explains it."""
        return self in (Standing.NEW, Standing.STILL, Standing.BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A campaign in which a finding showed."""

    run: str
    """Id of the campaign."""
    began: str
    """Start of the campaign, in UTC."""
    torch: str
    """Torch version."""
    torch_commit: str
    """Commit from which torch was built; empty if unknown."""
    revision: str
    """The user repository's commit; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """A user's decision to ignore a finding until a certain day. Campaigns with this finding then do not fail."""

    reason: str
    """Reason for the decision."""
    until: str
    """Last day on which the decision holds, such as ``2026-01-31``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finding's history over all campaigns."""

    fingerprint: str
    """12 hex digits, equal for all verdicts with the same fault."""
    name: str
    """Name of the finding's case."""
    outcome: Outcome
    """Outcome of the finding's check."""
    reason: str
    """Reason for the outcome."""
    standing: Standing
    """Status after the last campaign with a definite answer."""
    first: Sighting
    """First campaign in which the finding showed."""
    last: Sighting
    """Last campaign in which the finding showed."""
    decided_by: str
    """Id of the last campaign with a definite answer."""
    accepted: Acceptance | None
    """The user's decision to ignore the finding; None if there is no decision, or if it has expired."""

    @property
    def is_open(self) -> bool:
        """Whether the finding shows, and the user has not decided to ignore it."""
        return self.standing.shows and self.accepted is None


def records(history: History, until: str = ALWAYS) -> tuple[Record, ...]:
    """Return each finding's history, newest first. Only campaigns begun up to `until` count."""
    if not history.path.exists():
        return ()
    with history.open(writes=False) as db:
        rows = db.execute("SELECT * FROM finding ORDER BY fingerprint").fetchall()
        found = [record for row in rows if (record := _record(db, row, until)) is not None]
    return tuple(sorted(found, key=lambda record: record.first.began, reverse=True))


def accept(history: History, fingerprint: str, reason: str, until: date) -> None:
    """Ignore a finding up to and including the day `until`. Campaigns with this finding do not fail.

    Raises `UsageError` for a past day or an empty reason.
    """
    if until < _today():
        raise UsageError(f"last day {until} is not valid: it is in the past. Expected {_today()} or later")
    if not reason.strip():
        raise UsageError("the reason is empty. Expected a text that says why the finding must not fail a run")
    with history.open() as db:
        db.execute("INSERT OR REPLACE INTO acceptance VALUES (?, ?, ?)", (fingerprint, reason.strip(), until.isoformat()))


def withdraw(history: History, fingerprint: str) -> None:
    """Take back the decision to ignore a finding."""
    with history.open() as db:
        db.execute("DELETE FROM acceptance WHERE fingerprint = ?", (fingerprint,))


def _record(db: sqlite3.Connection, row: sqlite3.Row, until: str) -> Record | None:
    seen = db.execute(
        "SELECT run.*, sighting.seen FROM sighting JOIN run ON run.id = sighting.run"
        " WHERE fingerprint = ? AND run.began <= ? ORDER BY run.began, run.id",
        (row["fingerprint"], until),
    ).fetchall()
    telling = [(run, Recheck(run["seen"])) for run in seen if Recheck(run["seen"]) is not Recheck.UNTOLD]
    shown = [run for run, again in telling if again in _SHOWS]
    if not shown:
        return None
    accepted = db.execute(
        "SELECT * FROM acceptance WHERE fingerprint = ? AND until >= ?", (row["fingerprint"], _today().isoformat())
    ).fetchone()
    return Record(
        fingerprint=row["fingerprint"],
        name=row["name"],
        outcome=Outcome(row["outcome"]),
        reason=row["reason"],
        standing=_standing([again for _, again in telling]),
        first=_sighting(shown[0]),
        last=_sighting(shown[-1]),
        decided_by=telling[-1][0]["id"],
        accepted=None if accepted is None else Acceptance(reason=accepted["reason"], until=accepted["until"]),
    )


_SHOWS = (Recheck.SHOWS, Recheck.DIFFERENTLY)
"""Results which prove a finding unfixed. A case failing in another way also proves it."""


def _standing(answers: Sequence[Recheck]) -> Standing:
    if answers[-1] not in _SHOWS:
        return Standing.ON_FILE if answers[-1] is Recheck.KNOWN else Standing.FIXED
    if not any(again in _SHOWS for again in answers[:-1]):
        return Standing.NEW
    return Standing.STILL if answers[-2] in _SHOWS else Standing.BACK


def _sighting(run: sqlite3.Row) -> Sighting:
    return Sighting(
        run=run["id"], began=run["began"], torch=run["torch"], torch_commit=run["torch_commit"], revision=run["revision"]
    )


def _today() -> date:
    return datetime.now(UTC).date()


_FAILING = {
    Mode.PLAIN: (Standing.NEW, Standing.STILL, Standing.BACK),
    Mode.EXPLORE: (),
    Mode.PR: (Standing.NEW,),
    Mode.NIGHTLY: (Standing.NEW, Standing.BACK),
}


def records_decided_by(run: Run, records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the findings whose status comes from this campaign, because it gave the last definite answer about them."""
    return tuple(record for record in records if record.decided_by == run.id)


def fails(run: Run, record: Record) -> bool:
    """Whether a finding makes a campaign fail, which depends on the campaign's mode. Findings accepted by the user never do."""
    counts = can_make_run_fail(run, record.name)
    return counts and record.decided_by == run.id and record.is_open and record.standing in _FAILING[run.mode]


def can_make_run_fail(run: Run, name: str) -> bool:
    """Whether a finding in a case called `name` could make the campaign fail.

    `name` is a layout's name, or `TensorProgram.tag` for all tensor programs.
    """
    return bool(_FAILING[run.mode]) and (run.fail_on is FailOn.ALL or name != TensorProgram.tag)


def failing(history: History, runs: Iterable[Run]) -> tuple[Record, ...]:
    """Return the findings that make any of the campaigns fail.

    Each finding is returned once, with its status at the first of these campaigns that fails because of it.
    """
    found: dict[str, Record] = {}
    for run in runs:
        for record in records(history, run.began):
            if fails(run, record):
                found.setdefault(record.fingerprint, record)
    return tuple(found.values())
