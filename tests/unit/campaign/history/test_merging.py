"""Stores of several machines in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.findings.finding import load_finding
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.merging import merge, require_sources
from equivcheck.campaign.history.run import Ended
from equivcheck.campaign.history.standing import Standing, records
from equivcheck.errors import UsageError
from unit.campaign import fakes
from unit.campaign.history.runs import MARK, nights, run
from unit.campaign.history.test_history import FIGURES, rows


def test_the_smallest_scenario_of_a_finding_is_kept_with_where_it_was_found(tmp_path: Path) -> None:
    """Whichever store had it, and the other stores stay as they are."""
    one, other, into = (FindingStore(tmp_path / name) for name in ("one", "other", "into"))
    for store, width in ((one, 3), (other, 2), (into, 4)):
        store.keep(fakes.diverged(fakes.scenario(width=width)))
    (mark,) = into.fingerprints()
    environment = other.folder(mark) / "environment.json"
    environment.write_text(environment.read_text().replace('"torch": "', '"torch": "0.'))
    assert merge(one.path, into.path).kept == {Kept.BETTER: 1}
    assert merge(other.path, into.path).kept == {Kept.BETTER: 1}
    assert merge(one.path, into.path).kept == {Kept.SEEN: 1}
    assert load_finding(into.folder(mark)).verdict.scenario == fakes.scenario(width=2)
    assert load_finding(into.folder(mark)).environment.torch.startswith("0.")
    assert load_finding(one.folder(mark)).verdict.scenario == fakes.scenario(width=3)


def test_runs_of_all_stores_make_one_history(tmp_path: Path) -> None:
    """A finding that one machine saw fixed and a later one saw again is back; merged twice, it is the same."""
    one, other = History(tmp_path / "one"), History(tmp_path / "other")
    nights(one, Recheck.SHOWS, Recheck.DOES_NOT)
    other.begin(run(5))
    other.see(run(5), MARK, fakes.diverged(fakes.scenario()))
    into = tmp_path / "into"
    assert [merge(store.path.parent, into).num_runs for store in (other, one, one)] == [1, 2, 0]
    (record,) = records(History(into))
    assert record.standing is Standing.BACK
    assert (record.first.run, record.last.run) == ("run 0", "run 5")


def test_a_run_that_went_on_after_it_was_merged_is_replaced(tmp_path: Path) -> None:
    """A store that is copied while a campaign writes it is half a run; the whole one comes later."""
    source, into = History(tmp_path / "source"), History(tmp_path / "into")
    source.begin(run(0))
    merge(source.path.parent, into.path.parent)
    source.note(run(0), FIGURES)
    source.end(run(0), Ended.FINISHED)
    merge(source.path.parent, into.path.parent)
    assert rows(into, "SELECT checks, ended FROM run") == [(3, "finished")]
    assert len(rows(into, "SELECT * FROM progress")) == 1


def test_a_folder_that_is_no_finding_is_left_out_and_named(tmp_path: Path) -> None:
    """The others are merged."""
    source = FindingStore(tmp_path / "source")
    source.keep(fakes.diverged(fakes.scenario()))
    source.folder("bad").mkdir()
    merged = merge(source.path, tmp_path / "into")
    assert merged.kept == {Kept.NEW: 1}
    assert len(merged.broken) == 1


def test_a_store_that_is_not_there_or_the_same_is_refused(tmp_path: Path) -> None:
    """Before anything is merged."""
    with pytest.raises(UsageError, match="no such folder"):
        require_sources([tmp_path, tmp_path / "missing"], tmp_path / "into")
    with pytest.raises(UsageError, match="it is the destination"):
        require_sources([tmp_path], tmp_path)
