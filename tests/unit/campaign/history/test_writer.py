"""A campaign's history is written while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck.campaign.events import Event, KeptFinding, Summary, Ticked
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.campaign.history.history import FILE, History
from equivcheck.campaign.history.standing import Standing, records
from equivcheck.campaign.history.writer import HistoryWriter
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from unit.campaign import fakes
from unit.campaign.history.runs import run
from unit.campaign.history.test_history import rows

DIVERGED = fakes.diverged(fakes.scenario())


def tally(num_checks: int) -> Tally:
    """As many equivalent checks of half a second."""
    counted = Tally()
    for _ in range(num_checks):
        counted.add(Verdict(outcome=Outcome.EQUIVALENT, scenario=fakes.scenario(), world="sim"), 0.5)
    return counted


def ticked(seconds: float, num_checks: int) -> Ticked:
    """A campaign so far."""
    return Ticked(seconds=seconds, tally=tally(num_checks), num_findings=1)


def summary(store: FindingStore, **fields: object) -> Summary:
    """Its end."""
    return Summary(plan=Plan(seed=0, seconds=60.0), seconds=60.0, tally=tally(4), findings=(), store=store.path, **fields)  # type: ignore[arg-type]


def finding(store: FindingStore) -> KeptFinding:
    """What it found."""
    return KeptFinding(fingerprint="0123456789ab", path=store.folder("0123456789ab"), verdict=DIVERGED, kept=Kept.NEW)


def write(store: FindingStore, events: Sequence[Event]) -> HistoryWriter:
    """A run of those events."""
    writer = HistoryWriter(store, run(0))
    for event in events:
        writer(event)
    return writer


def test_figures_are_noted_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    """A run that is killed leaves what it had counted ten seconds before at the latest."""
    store = FindingStore(tmp_path)
    write(store, [ticked(seconds, int(seconds)) for seconds in (1.0, 11.0, 12.0, 22.0)])
    assert rows(History(tmp_path), "SELECT seconds, checks FROM progress ORDER BY seconds") == [(11.0, 11), (22.0, 22)]
    assert rows(History(tmp_path), "SELECT seconds FROM cost") == [(11.0,)]


@pytest.mark.parametrize(
    ("fields", "ended"), [({}, "finished"), ({"interrupted": True}, "interrupted"), ({"broken": "because"}, "broken")]
)
def test_a_run_says_how_it_ended(tmp_path: Path, fields: dict[str, object], ended: str) -> None:
    """Only one that was killed does not."""
    store = FindingStore(tmp_path)
    write(store, [finding(store), summary(store, **fields)])
    assert rows(History(tmp_path), "SELECT ended, checks FROM run") == [(ended, 4)]
    assert [record.standing for record in records(History(tmp_path))] == [Standing.NEW]


def test_a_finding_of_a_store_without_a_history_is_not_new(tmp_path: Path) -> None:
    """It was found at the time and with the torch that its folder says."""
    store = FindingStore(tmp_path)
    store.keep(DIVERGED)
    (mark,) = store.fingerprints()
    writer = HistoryWriter(store, run(90))
    writer._history.see(run(90), mark, DIVERGED)
    (record,) = records(History(tmp_path))
    assert record.standing is Standing.STILL
    assert record.first.began == store.load(mark).environment.date


def test_a_writer_that_was_killed_before_a_finding_was_entered_hinders_no_other(tmp_path: Path) -> None:
    """Nor does one that enters it at the same time: its run is there already."""
    store = FindingStore(tmp_path)
    store.keep(DIVERGED)
    (mark,) = store.fingerprints()
    History(tmp_path).begin(replace(run(0), id=f"found {mark}"))
    HistoryWriter(store, run(1))
    assert [record.fingerprint for record in records(History(tmp_path))] == [mark]


def test_a_disk_that_fails_ends_no_campaign(tmp_path: Path) -> None:
    """What is written later is lost, and the writer says why."""
    store = FindingStore(tmp_path)
    writer = HistoryWriter(store, run(0))
    tmp_path.joinpath(FILE).write_text("no database any more " * 100)
    writer(finding(store))
    writer(summary(store))
    assert "cannot be used: file is not a database" in writer.failed
