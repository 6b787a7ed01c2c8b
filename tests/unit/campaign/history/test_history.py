"""The file of a history: whole runs in it, whatever happens to who writes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import pytest

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.history.history import FILE, Figures, History, HistoryFailed
from equivcheck.campaign.history.past import past_runs
from equivcheck.campaign.history.run import Ended, FailOn
from equivcheck.campaign.history.standing import records
from equivcheck.oracle.verdict.verdict import Outcome
from unit.campaign.history.runs import nights, run

FIGURES = Figures(
    seconds=12.0,
    checks=3,
    pairs=40,
    of_pairs=100,
    num_findings=1,
    outcomes={("ddp", Outcome.EQUIVALENT): 2, ("ddp", Outcome.DIVERGED): 1},
    costs={"ddp": 1.5},
)


def rows(history: History, query: str) -> list[tuple[object, ...]]:
    """What a query gives."""
    with history.open() as db:
        return [tuple(row) for row in db.execute(query)]


def test_a_run_is_kept_with_its_figures(tmp_path: Path) -> None:
    """The last ones, and how it came to them."""
    history = History(tmp_path)
    history.begin(run(0, shard="2/8"))
    history.note(run(0), FIGURES)
    history.note(run(0), FIGURES)
    history.end(run(0), Ended.INTERRUPTED)
    assert rows(history, "SELECT id, mode, shard, checks, pairs, of_pairs, ended FROM run") == [
        ("run 0", "nightly", "2/8", 3, 40, 100, "interrupted")
    ]
    assert rows(history, "SELECT * FROM outcome ORDER BY outcome") == [
        ("run 0", "ddp", "diverged", 1),
        ("run 0", "ddp", "equivalent", 2),
    ]
    assert rows(history, "SELECT * FROM cost") == [("run 0", "ddp", 1.5)]
    assert rows(history, "SELECT * FROM progress") == [("run 0", 12.0, 3, 40, 1)]


KILLED = """
import os, signal, sys
from pathlib import Path
from equivcheck.campaign.history.history import History
from unit.campaign.history.runs import run
from unit.campaign.history.test_history import FIGURES
history = History(Path(sys.argv[1]))
history.begin(run(0))
history.note(run(0), FIGURES)
with history.open() as db:
    db.execute("UPDATE run SET checks = 1000")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_written_survives_the_writer(tmp_path: Path) -> None:
    """A process that is killed in the middle of a transaction leaves the one before."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, env={**os.environ, "PYTHONPATH": path})
    assert ended.returncode == -signal.SIGKILL
    assert rows(History(tmp_path), "SELECT checks, ended FROM run") == [(3, "")]


def test_a_file_that_is_no_history_is_one_clear_error(tmp_path: Path) -> None:
    """It names the file, and leaves it as it is."""
    tmp_path.joinpath(FILE).write_text("not a database " * 100)
    with pytest.raises(HistoryFailed, match=rf"{FILE} cannot be used: file is not a database"):
        History(tmp_path).begin(run(0))
    assert tmp_path.joinpath(FILE).read_text().startswith("not a database")


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """A file of another version is not written over."""
    nights(History(tmp_path), Recheck.SHOWS)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(HistoryFailed, match=r"its schema 99 comes from a newer equivcheck\. Upgrade equivcheck"):
        History(tmp_path).fingerprints()


def test_a_history_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    """Runs from before `--fail-on` existed read as failing on all findings, and nothing of them is lost."""
    schema = files("equivcheck.campaign.history").joinpath("schema.sql").read_text("utf-8")
    first_schema = re.sub(r",( +-- finished.*\n) +fail_on.*\n", r"\1", schema)
    assert "fail_on" not in first_schema
    night = {**asdict(run(0)), "mode": "nightly"}
    del night["fail_on"]
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.executescript(f"{first_schema} PRAGMA user_version = 1;")
        db.execute(f"INSERT INTO run ({', '.join(night)}) VALUES ({', '.join('?' * len(night))})", tuple(night.values()))
        db.commit()
    assert [past.run for past in past_runs(History(tmp_path))] == [run(0)]
    assert run(0).fail_on is FailOn.ALL


def test_to_look_makes_no_file(tmp_path: Path) -> None:
    """A store without a history stays one."""
    assert History(tmp_path).fingerprints() == frozenset()
    assert list(tmp_path.iterdir()) == []


def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    """`triage` and `report` read what was there before a transaction that is still open."""
    history = History(tmp_path)
    nights(history, Recheck.SHOWS)
    with history.open() as db:
        db.execute("DELETE FROM sighting")
        assert len(records(history)) == 1
        assert [past.run.id for past in past_runs(history)] == ["run 0"]
    assert records(history) == ()
