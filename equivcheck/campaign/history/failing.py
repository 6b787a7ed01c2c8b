"""What makes a run fail."""

from __future__ import annotations

from collections.abc import Iterable

from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.run import FailOn, Mode, Run
from equivcheck.campaign.history.standing import Record, Standing, records
from equivcheck.programs.nouns import TensorProgram

_FAILING = {
    Mode.PLAIN: (Standing.NEW, Standing.STILL, Standing.BACK),
    Mode.EXPLORE: (),
    Mode.PR: (Standing.NEW,),
    Mode.NIGHTLY: (Standing.NEW, Standing.BACK),
}


def told_in(run: Run, records: Iterable[Record]) -> tuple[Record, ...]:
    """The findings of which a run told whether they show."""
    return tuple(record for record in records if record.told == run.id)


def fails(run: Run, record: Record) -> bool:
    """Whether a finding makes a run fail: by how it stands, and unless somebody has accepted it."""
    counts = can_fail(run, record.name)
    return counts and record.told == run.id and record.is_open and record.standing in _FAILING[run.mode]


def can_fail(run: Run, name: str) -> bool:
    """Whether a finding in a case of this name can make a run fail at all."""
    return bool(_FAILING[run.mode]) and (run.fail_on is FailOn.ALL or name != TensorProgram.tag)


def failing(history: History, runs: Iterable[Run]) -> tuple[Record, ...]:
    """The findings that make any of some runs fail, as each stood after the first run that it does, one for each fingerprint."""
    found: dict[str, Record] = {}
    for run in runs:
        for record in records(history, run.began):
            if fails(run, record):
                found.setdefault(record.fingerprint, record)
    return tuple(found.values())
