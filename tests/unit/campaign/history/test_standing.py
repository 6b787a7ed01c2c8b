"""How a finding stands follows from the runs that told of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.run import FailOn, Mode
from equivcheck.campaign.history.standing import Record, Standing, accept, can_make_run_fail, fails, records, withdraw
from equivcheck.errors import UsageError
from unit.campaign import fakes
from unit.campaign.history.runs import MARK, nights, run

TODAY = date(2030, 5, 17)


@pytest.fixture(autouse=True)
def _one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no midnight fall between two lines of a test."""
    monkeypatch.setattr("equivcheck.campaign.history.standing._today", lambda: TODAY)


def only(history: History) -> Record:
    """The record of the one finding."""
    (record,) = records(history)
    return record


@pytest.mark.parametrize(
    ("seen", "standing"),
    [
        ((Recheck.SHOWS,), Standing.NEW),
        ((None, Recheck.SHOWS), Standing.NEW),
        ((Recheck.SHOWS, Recheck.SHOWS), Standing.STILL),
        ((Recheck.SHOWS, Recheck.UNTOLD, Recheck.SHOWS), Standing.STILL),
        ((Recheck.SHOWS, None, Recheck.SHOWS), Standing.STILL),
        ((Recheck.SHOWS, Recheck.DIFFERENTLY), Standing.STILL),
        ((Recheck.SHOWS, Recheck.DOES_NOT), Standing.FIXED),
        ((Recheck.SHOWS, Recheck.DOES_NOT, Recheck.UNTOLD), Standing.FIXED),
        ((Recheck.SHOWS, Recheck.DOES_NOT, Recheck.SHOWS), Standing.BACK),
        ((Recheck.SHOWS, Recheck.DOES_NOT, Recheck.SHOWS, Recheck.SHOWS), Standing.STILL),
        ((Recheck.SHOWS, Recheck.KNOWN), Standing.ON_FILE),
        ((Recheck.SHOWS, Recheck.KNOWN, Recheck.SHOWS), Standing.BACK),
    ],
)
def test_a_finding_stands_as_the_last_runs_say(tmp_path: Path, seen: tuple[Recheck | None, ...], standing: Standing) -> None:
    """What a run does not tell of, or cannot tell, changes nothing."""
    history = History(tmp_path)
    nights(history, *seen)
    record = only(history)
    assert record.standing is standing
    shown = [number for number, again in enumerate(seen) if again in (Recheck.SHOWS, Recheck.DIFFERENTLY)]
    assert (record.first.torch, record.last.torch) == (f"2.{shown[0]}.0", f"2.{shown[-1]}.0")
    assert (record.first.torch_commit, record.first.revision) == ("c0ffee", "beef")


def test_what_never_showed_is_no_record(tmp_path: Path) -> None:
    """A store may hold what this machine's torch never had."""
    history = History(tmp_path)
    nights(history, Recheck.DOES_NOT)
    assert records(history) == ()


def test_that_it_shows_is_never_taken_back(tmp_path: Path) -> None:
    """A finding that does not show in its own scenario any more, but in another one, is not fixed."""
    history = History(tmp_path)
    nights(history, Recheck.SHOWS)
    before = only(history)
    history.see(run(0), MARK, fakes.diverged(fakes.scenario()), Recheck.DOES_NOT)
    assert only(history) == before


@pytest.mark.parametrize(
    ("seen", "failing"),
    [
        ((Recheck.SHOWS,), {Mode.PLAIN, Mode.PR, Mode.NIGHTLY}),
        ((Recheck.SHOWS, Recheck.SHOWS), {Mode.PLAIN}),
        ((Recheck.SHOWS, Recheck.DOES_NOT, Recheck.SHOWS), {Mode.PLAIN, Mode.NIGHTLY}),
        ((Recheck.SHOWS, Recheck.DOES_NOT), set()),
    ],
)
def test_a_mode_says_what_makes_a_run_fail(tmp_path: Path, seen: tuple[Recheck, ...], failing: set[Mode]) -> None:
    """A look fails on everything, a pull request on what is new, a night also on what is back; nothing accepted fails any."""
    history = History(tmp_path)
    nights(history, *seen)
    last = len(seen) - 1
    assert {mode for mode in Mode if fails(run(last, mode=mode), only(history))} == failing
    assert not fails(run(last + 1, mode=Mode.PLAIN), only(history))
    accept(history, MARK, "told upstream", TODAY)
    assert not any(fails(run(last, mode=mode), only(history)) for mode in Mode)


def test_a_run_that_fails_on_trainings_passes_findings_in_tensor_programs() -> None:
    """A finding in a training makes it fail; a run that explores fails on nothing."""
    nightly = run(0)
    only_trainings = replace(nightly, fail_on=FailOn.TRAININGS)
    names = (fakes.program().name, fakes.scenario().name)
    assert [can_make_run_fail(nightly, name) for name in names] == [True, True]
    assert [can_make_run_fail(only_trainings, name) for name in names] == [False, True]
    assert [can_make_run_fail(run(0, mode=Mode.EXPLORE), name) for name in names] == [False, False]


def test_an_acceptance_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up to its last day, or until it is withdrawn."""
    history = History(tmp_path)
    nights(history, Recheck.SHOWS)
    accept(history, MARK, " told upstream ", TODAY + timedelta(days=1))
    assert only(history).accepted is not None
    assert not only(history).is_open
    monkeypatch.setattr("equivcheck.campaign.history.standing._today", lambda: TODAY + timedelta(days=2))
    assert only(history).is_open
    monkeypatch.undo()
    withdraw(history, MARK)
    assert only(history).is_open


def test_an_acceptance_without_a_reason_or_with_a_day_that_is_over_is_refused(tmp_path: Path) -> None:
    """Silence needs a reason and an end."""
    history = History(tmp_path)
    nights(history, Recheck.SHOWS)
    with pytest.raises(UsageError, match="reason is empty"):
        accept(history, MARK, " ", TODAY)
    with pytest.raises(UsageError, match=r"Expected .* or later"):
        accept(history, MARK, "told upstream", TODAY - timedelta(days=1))
