"""Rules for failing runs."""

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
    """Findings that this run decided last."""
    return tuple(record for record in records if record.told == run.id)


def fails(run: Run, record: Record) -> bool:
    """Whether a finding makes a run fail. Accepted findings do not."""
    counts = can_fail(run, record.name)
    return counts and record.told == run.id and record.is_open and record.standing in _FAILING[run.mode]


def can_fail(run: Run, name: str) -> bool:
    """Whether findings in cases with this name can make a run fail."""
    return bool(_FAILING[run.mode]) and (run.fail_on is FailOn.ALL or name != TensorProgram.tag)


def failing(history: History, runs: Iterable[Run]) -> tuple[Record, ...]:
    """Findings that make any run fail, one per fingerprint, as they stood after the first failing run."""
    found: dict[str, Record] = {}
    for run in runs:
        for record in records(history, run.began):
            if fails(run, record):
                found.setdefault(record.fingerprint, record)
    return tuple(found.values())
