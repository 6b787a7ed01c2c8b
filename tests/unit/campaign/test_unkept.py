"""Campaigns whose store cannot be written."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from equivcheck.campaign.events import Event
from equivcheck.campaign.findings.finding import StoreFailed
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.report.campaign.summary_object import summary_object
from equivcheck.report.campaign.summary_text import print_summary
from equivcheck.scenario.file_format.codec import from_json, to_json
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

PLAN = Plan(num_checks=20, seed=0, strategy=fakes.some_scenarios, check=fakes.wide_diverges)


class FullStore(FindingStore):
    """A store that can be written again once so many writes have failed."""

    def __init__(self, path: Path, failures: int) -> None:
        super().__init__(path)
        self.left = failures

    def keep(self, verdict: Verdict) -> Kept:
        """Fail as on a full disk."""
        self.left -= 1
        if self.left >= 0:
            raise StoreFailed("findings cannot be kept: No space left on device")
        return super().keep(verdict)


def test_a_finding_that_cannot_be_kept_is_in_the_summary(tmp_path: Path) -> None:
    """It is neither lost nor the end of the campaign; whoever reads the summary is told that it is nowhere else."""
    summary = fuzz(PLAN, FullStore(tmp_path / "findings", 1000))
    (finding,) = summary.findings
    assert finding.kept is Kept.UNKEPT
    assert summary.unkept == "findings cannot be kept: No space left on device"
    assert not summary.broken
    told = summary_object(summary)["findings"][0]
    assert told["path"] is None
    assert from_json(json.dumps(told["verdict"]["scenario"])) == finding.verdict.scenario
    printed = io.StringIO()
    print_summary(Console(file=printed, width=160), summary)
    assert to_json(finding.verdict.scenario) in printed.getvalue()


def test_what_could_not_be_kept_is_kept_once_that_is_possible(tmp_path: Path) -> None:
    """Disks fill up for a while; the end of the campaign is the last moment to try again."""
    store = FullStore(tmp_path / "findings", 1)
    summary = fuzz(replace(PLAN, shrink_seconds=0.0), store)
    (finding,) = summary.findings
    assert not summary.unkept
    assert finding.kept is not Kept.UNKEPT
    assert store.load(finding.fingerprint).verdict == finding.verdict


def test_a_campaign_that_could_keep_nothing_does_not_begin(tmp_path: Path) -> None:
    """A store that cannot be written is told before time is spent."""
    (tmp_path / "file").touch()
    heard: list[Event] = []
    with pytest.raises(StoreFailed, match="findings cannot be kept in"):
        fuzz(PLAN, FindingStore(tmp_path / "file"), [heard.append])
    assert heard == []
