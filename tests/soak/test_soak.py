"""The long campaign that `soak.py` runs, for a short while."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from equivcheck.campaign.plan import Plan
from soak.soak import soak
from unit.campaign import fakes


def test_a_soak_tells_what_its_workers_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker is seen more than once, and neither threads, nor open files, nor temporary files grow while it checks."""
    plan = Plan(num_checks=200, seed=0, num_workers=2, strategy=fakes.some_scenarios, check=fakes.fine)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    summary, watch = soak(plan, tmp_path / "findings")
    assert summary.tally.num_checks == 200
    found = watch.report()
    assert len(found["usage_of_workers"]) == 2
    for used in found["usage_of_workers"].values():
        first, last = used["checks"]
        assert last > first
        assert all(used["later"][each] <= used["earlier"][each] for each in ("threads", "files"))
    assert found["temporary_files"]["most"] == 0
