"""Runs, read from a history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.merging import merge
from equivcheck.campaign.history.past import past_runs, run_details
from equivcheck.campaign.history.run import Ended
from equivcheck.campaign.history.standing import Standing, records
from unit.campaign import fakes
from unit.campaign.history.runs import MARK, nights, run
from unit.campaign.history.test_history import FIGURES


def test_a_run_is_read_as_it_was_entered(tmp_path: Path) -> None:
    """What was known when it began, its figures, and what it left."""
    history = History(tmp_path)
    history.begin(run(0, shard="2/8"))
    history.note(run(0), FIGURES)
    history.summarize(run(0), {"seed": 0})
    history.end(run(0), Ended.INTERRUPTED)
    (past,) = past_runs(history)
    assert past.run == run(0, shard="2/8")
    assert (past.ended, past.checks, past.rate, past.share) == (Ended.INTERRUPTED, 3, 0.25, 0.4)
    left = run_details(history, past.run)
    assert (left.outcomes, left.costs) == (FIGURES.outcomes, FIGURES.costs)
    assert left.progress == ((12.0, 3, 40),)
    assert left.summary == {"seed": 0}


def test_runs_up_to_one_are_read_last_first(tmp_path: Path) -> None:
    """With how many findings showed in each, in whatever way; a finding that was kept without a history is no run."""
    history = History(tmp_path)
    assert list(past_runs(history)) == []
    history.begin(replace(run(1), id="found", seed=None))
    nights(history, Recheck.SHOWS, Recheck.DOES_NOT, Recheck.DIFFERENTLY, Recheck.KNOWN)
    history.see(run(2), "ba9876543210", fakes.diverged(fakes.scenario()))
    assert [(past.run.id, past.num_findings) for past in past_runs(history, run(2).began)] == [
        ("run 2", 2),
        ("run 1", 0),
        ("run 0", 1),
    ]


def test_findings_are_read_as_they_stood(tmp_path: Path) -> None:
    """After any run, as if no other had come after it; before the first that saw it, there is none."""
    history = History(tmp_path)
    nights(history, None, Recheck.SHOWS, Recheck.DOES_NOT, Recheck.SHOWS)
    stood = [[(each.fingerprint, each.standing) for each in records(history, run(number).began)] for number in range(4)]
    assert stood == [[], [(MARK, Standing.NEW)], [(MARK, Standing.FIXED)], [(MARK, Standing.BACK)]]


def test_what_a_run_left_is_merged_with_it(tmp_path: Path) -> None:
    """A page can be made of the merged store."""
    source, into = History(tmp_path / "source"), History(tmp_path / "into")
    source.begin(run(0))
    source.summarize(run(0), {"seed": 0})
    source.end(run(0), Ended.FINISHED)
    merge(source.path.parent, into.path.parent)
    assert run_details(into, run(0)).summary == {"seed": 0}
