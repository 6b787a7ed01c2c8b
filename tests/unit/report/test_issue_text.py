"""A run that failed, as an issue that can be read without anything else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.findings.versions import Method, ShownIn, VersionAnswer
from equivcheck.campaign.history.history import History
from equivcheck.campaign.history.standing import records
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.report.issue_text import Reported, issue_text, issue_title
from equivcheck.scenario.file_format.codec import from_json
from unit.campaign import fakes
from unit.campaign.history.runs import nights, run

DIVERGED = fakes.diverged(fakes.scenario())


@pytest.fixture
def reported(tmp_path: Path) -> Reported:
    """A finding of two nights."""
    store = FindingStore(tmp_path)
    store.keep(DIVERGED)
    nights(History(tmp_path), Recheck.SHOWS, Recheck.SHOWS, mark=fingerprint(DIVERGED))
    (record,) = records(History(tmp_path))
    return Reported(record=record, finding=store.load(record.fingerprint), script="print('```')")


def test_the_title_says_what_failed_where(reported: Reported) -> None:
    """In one line that GitHub takes, however much it is."""
    assert issue_title([run(1)], [reported]) == "nightly: 1 finding on torch 2.1.0: ddp diverged"
    assert len(issue_title([run(1)], [reported] * 100)) <= 200


def test_the_text_has_all_that_its_readers_need(reported: Reported) -> None:
    """What is wrong, since when, the versions, and a scenario that can be checked again."""
    text = issue_text([run(1, shard="2/8")], [reported])
    assert DIVERGED.describe() in text
    assert "First seen 2030-01-01 with torch 2.0.0 (c0ffee) at beef; last seen 2031-01-01" in text
    assert "seed 1, shard 2/8" in text
    assert f"Not bisected yet: `equivcheck bisect {fingerprint(DIVERGED)}`" in text
    (scenario,) = re.findall(r"```json\n(.*?)\n```", text, re.DOTALL)
    assert json.loads(scenario)
    assert from_json(scenario) == DIVERGED.scenario


def test_a_text_is_no_longer_than_an_issue_may_be(reported: Reported) -> None:
    """What there is no room for is left out, the script of a finding first; each of them is named."""
    long = replace(reported, script="pass\n" * 12_000)
    for findings in ([long, reported, long], [reported] * 200):
        text = issue_text([run(1)], findings)
        assert len(text) <= 65_536
        assert text.count("\n## still there: ddp diverged\n") == len(findings)
        assert text.count("There is no room here for") == len(findings) - text.count("scenario.json</summary>") > 0
    assert issue_text([run(1)], [long, reported, long]).count(DIVERGED.describe()) == 3


def test_a_fence_is_longer_than_those_in_its_text(reported: Reported) -> None:
    """A script may have some of its own."""
    assert "````python\nprint('```')\n````" in issue_text([run(1)], [reported])


def test_a_bisection_and_a_missing_script_are_told(reported: Reported) -> None:
    """The one in its sentence, the other with its reason."""
    measured = tuple(
        VersionAnswer(torch=version, showing=Showing(shows=shows))
        for version, shows in (("2.10.0", Shows.DOES_NOT), ("2.11.0", Shows.SHOWS))
    )
    shown_in = ShownIn(by=Method.SCRIPT, versions=("2.10.0", "2.11.0"), measured=measured)
    bisected = replace(reported, finding=replace(reported.finding, shown_in=shown_in), script="", why_no_script="lower precision")
    text = issue_text([run(1)], [bisected])
    assert "From torch 2.10.0 to 2.11.0, it begins in 2.11.0" in text
    assert "There is no torch-only script: lower precision" in text
