"""The page about a run: all that the run left, in one file that is read anywhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import pytest

from equivcheck.campaign.events import NodeWork
from equivcheck.campaign.findings.fate import Recheck
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.campaign.history.history import History, HistoryFailed
from equivcheck.campaign.history.run import Ended, Mode
from equivcheck.campaign.workers.messages import Control
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from unit.campaign import fakes
from unit.campaign.history.runs import nights, run
from unit.report.html_page import require_sound
from unit.report.pages import Page, campaign, tally

DIVERGED = fakes.diverged(fakes.scenario())
HOSTILE = "<script>alert('&')</script>\x1b[31m\x00\u202e"
OTHER_OUTCOMES = (Outcome.EQUIVALENT, Outcome.EQUIVALENT, Outcome.KNOWN, Outcome.INCONCLUSIVE, Outcome.DIVERGED)


def many(number: int) -> list[Verdict]:
    """Findings of as many kinds."""
    names = ("".join(letters) for letters in product(ascii_lowercase, repeat=2))
    return [fakes.diverged(fakes.scenario(), tensor=name) for name in islice(names, number)]


def test_every_number_of_layouts_and_outcomes_is_there(tmp_path: Path) -> None:
    """In a row for each layout, with a column for each outcome that came up, and what its checks cost."""
    campaign(tmp_path, counted=tally(*OTHER_OUTCOMES))
    page = Page(tmp_path)
    heading, ddp, everything = page.rows("layouts")
    assert heading == ["layout", "share", "equivalent", "diverged", "known", "inconclusive", "checks"]
    assert ddp == ["ddp", "2", "1", "1", "1", "5"]
    assert everything == ["all", *ddp[1:]]
    assert page.rows("cost")[1][:3] == ["ddp", "2.5", "100.0 %"]
    assert page.rows("known")[1][:4] == ["ddp_static_graph_no_sync", "1", "1", "0"]
    assert "gradients_summed), a bug planted on purpose, was caught after 3 examples" in page.said("known")
    assert "of 2 checks" in page.said("errors")


def test_the_headline_says_what_was_run(tmp_path: Path) -> None:
    """Mode, versions, seed, shard, commits."""
    campaign(tmp_path, run(3, shard="2/8"))
    text = Page(tmp_path).text
    for part in ("nightly run of 2033-01-01 00:00 UTC", "seed3", "shard2/8", "torch2.3.0 (c0ffee)", "revisionbeef", "60.0 s"):
        assert part in text


@pytest.mark.parametrize("kind", ["found", "nothing", "killed", "just begun"])
def test_a_page_needs_nothing_from_elsewhere_and_can_be_read_aloud(tmp_path: Path, kind: str) -> None:
    """In whatever state the run is."""
    if kind == "just begun":
        History(tmp_path).begin(run(0))
    else:
        campaign(tmp_path, found=(DIVERGED,) if kind == "found" else (), killed=kind == "killed", counted=tally(*OTHER_OUTCOMES))
    page = Page(tmp_path)
    require_sound(page)
    assert len(list(page.root.iter("svg"))) >= (0 if kind == "just begun" else 5)


def test_a_finding_is_told_as_everywhere_else(tmp_path: Path) -> None:
    """Its text, its cause and scenario, how it stands, and what checks it again; exit code and verdict agree."""
    explained = replace(DIVERGED, diagnosis=Diagnosis(cause=Cause.SUMMED, sentence="gradients are summed", exact=True))
    campaign(tmp_path, 0, found=(explained,))
    campaign(tmp_path, run(1, mode=Mode.PLAIN), found=(explained,))
    page = Page(tmp_path)
    mark = fingerprint(DIVERGED)
    said = page.said("findings")
    assert " ".join(explained.describe().removesuffix(explained.code()).split()) in said
    assert " ".join(explained.code().split()) in said
    assert said.count("gradients are summed") == 2
    assert "fails the run still there" in said
    assert f"equivcheck replay {mark} --store {tmp_path}" in said
    assert f"equivcheck export {mark} --store {tmp_path}" in said
    assert "✗ fails: 1 finding" in page.text


def test_an_earlier_run_is_shown_as_it_stood(tmp_path: Path) -> None:
    """What came later is not told: in its night, the finding was new."""
    first = campaign(tmp_path, 0, found=(DIVERGED,))
    campaign(tmp_path, 1, found=(DIVERGED,))
    assert "still there" in Page(tmp_path).said("findings")
    page = Page(tmp_path, first.id)
    assert "fails the run new" in page.said("findings")
    assert len(page.rows("runs")) == 2


def test_a_finding_that_is_fixed_or_accepted_fails_nothing(tmp_path: Path) -> None:
    """It is named all the same."""
    nights(History(tmp_path), Recheck.SHOWS, Recheck.DOES_NOT)
    page = Page(tmp_path)
    assert "fixed" in page.said("findings")
    assert "fails the run" not in page.said("findings")
    assert "✓ nothing found" in page.text


def test_a_finding_whose_folder_is_gone_is_still_named(tmp_path: Path) -> None:
    """With what the history has of it."""
    nights(History(tmp_path), Recheck.SHOWS)
    said = Page(tmp_path).said("findings")
    assert DIVERGED.reason in said
    assert f"no longer in the store {tmp_path}" in said


def test_a_finding_that_could_not_be_kept_has_its_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page may be all that is left of it."""
    monkeypatch.setattr(FindingStore, "keep", lambda *_: Kept.UNKEPT)
    campaign(tmp_path, found=(DIVERGED,), unkept="no space left")
    page = Page(tmp_path)
    assert "✗ not all findings were kept: no space left; fails: 1 finding" in page.text
    assert '"microbatches": [ 2 ]' in page.said("findings")


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "✓ nothing found"),
        ({"interrupted": True}, "✓ nothing found, stopped before its end"),
        ({"broken": "ValueError: no\n  traceback"}, "✗ the checker itself failed: ValueError: no "),
        ({"control": None}, "✓ nothing found"),
        ({"control": Control(name="x", wrong="Y.", examples=9)}, "✗ proves nothing: the control was not caught"),
        ({"killed": True}, "✗ no result yet: the run was killed, or still goes on"),
    ],
)
def test_the_verdict_is_that_of_the_exit_code(tmp_path: Path, fields: dict[str, object], verdict: str) -> None:
    """What keeps a run from proving anything comes first."""
    campaign(tmp_path, **fields)  # type: ignore[arg-type]
    assert verdict in Page(tmp_path).text


def test_a_run_that_was_killed_shows_what_it_had_counted(tmp_path: Path) -> None:
    """And says of the rest that it is not known."""
    campaign(tmp_path, killed=True, counted=tally(*OTHER_OUTCOMES))
    page = Page(tmp_path)
    assert page.rows("layouts")[1] == ["ddp", "2", "1", "1", "1", "5"]
    assert page.root.findall(".//section[@id='time']//svg")
    for section in ("errors", "pairs", "known"):
        assert "Not known: the run left no summary." in page.said(section)


def test_text_of_unknown_origin_is_only_text(tmp_path: Path) -> None:
    """Wherever it stands: in names, reasons, commits, tracebacks."""
    hostile = replace(DIVERGED, reason=HOSTILE, diagnosis=Diagnosis(cause=Cause.SUMMED, sentence=HOSTILE, exact=True))
    entered = replace(run(0), torch=HOSTILE, torch_commit=HOSTILE, revision=HOSTILE, platform=HOSTILE, shard=HOSTILE)
    wrong = Control(name=HOSTILE, wrong=HOSTILE, examples=1, caught=True)
    campaign(tmp_path, entered, found=(hostile,), broken=HOSTILE, control=wrong)
    page = Page(tmp_path)
    assert "<script" not in page.source
    assert page.text.count("<script>") >= 8
    assert not [each for each in page.source if not each.isprintable() and each != "\n"]


def test_the_nodes_of_a_cluster_are_in_a_table(tmp_path: Path) -> None:
    """With the speed of each; what one machine did alone has none."""
    campaign(tmp_path)
    assert Page(tmp_path).rows("time") == []
    lost = NodeWork(name="10.0.0.3", num_workers=2, num_checks=1200, seconds=12.0, lost="lost: it is unplugged")
    campaign(tmp_path, 1, nodes=(lost,))
    heading, row = Page(tmp_path).rows("time")
    assert heading[0] == "node"
    assert row == ["10.0.0.3", "2", "1,200", "100.0", "lost: it is unplugged"]


@pytest.mark.parametrize("reason", ["", "'" * 5000])
def test_a_page_stays_small(tmp_path: Path, reason: str) -> None:
    """Two hundred findings are all named, whatever is said of them, and those that there is room for are told in full."""
    campaign(tmp_path, found=[replace(each, reason=reason or each.reason) for each in many(200)])
    page = Page(tmp_path)
    assert len(page.source.encode()) <= 500_000
    full, named = (len(page.root.findall(f".//section[@id='findings']//{tag}")) for tag in ("article", "li"))
    assert full + named == 200
    assert full >= 30
    assert "✗ fails: 200 findings" in page.text


def test_more_findings_than_there_is_room_for_are_counted(tmp_path: Path) -> None:
    """However many there are."""
    told = History(tmp_path)
    told.begin(run(0))
    for number in range(800):
        told.see(run(0), f"{number:012x}", DIVERGED)
    page = Page(tmp_path)
    assert len(page.source.encode()) <= 500_000
    full, named = (len(page.root.findall(f".//section[@id='findings']//{tag}")) for tag in ("article", "li"))
    assert f"And {800 - full - named} more." in page.text


def test_the_last_runs_are_listed(tmp_path: Path) -> None:
    """Twenty of them, this one marked."""
    for number in range(22):
        campaign(tmp_path, number, found=(DIVERGED,) if number == 21 else ())
    page = Page(tmp_path)
    heading, *rows = page.rows("runs")
    assert heading == ["began", "mode", "torch", "checks", "checks/s", "pairs", "findings", "ended"]
    assert len(rows) == 20
    assert rows[0][:5] == ["2051-01-01 00:00 UTC (this run)", "nightly", "2.21.0", "1", "0.0"]
    assert rows[0][6:] == ["1", "finished"]
    assert rows[1][6:] == ["0", "finished"]
    assert page.values("aria-current") == ["true"]


def test_pairs_that_are_missing_are_a_map(tmp_path: Path) -> None:
    """Of parts by parts, each two once; the sums are those of the summary."""
    campaign(tmp_path)
    page = Page(tmp_path)
    heading, *rows = page.rows("pairs")
    names = heading[1:]
    assert [row[0] for row in rows] == names
    assert [len(row) for row in rows] == [number + 2 for number in range(len(names))]
    missing = [re.match(r"([\d,]+) of ([\d,]+) missing", title) for title in page.values("title")]
    gone, legal = (sum(int(found[group].replace(",", "")) for found in missing if found) for group in (1, 2))
    assert f"{legal - gone:,} of {legal:,} legal pairs" in page.said("pairs")


def test_no_run_is_a_usage_error(tmp_path: Path) -> None:
    """One line; no history is made by asking for a page."""
    with pytest.raises(UsageError, match=r"has no run\. Expected a store that `equivcheck fuzz` has used"):
        Page(tmp_path)
    assert not list(tmp_path.iterdir())
    campaign(tmp_path, 0)
    with pytest.raises(
        UsageError,
        match=r"run 'beef' is not valid: no run in .* has an id that begins with it. "
        r"Expected an id, or the beginning of one: 0000000000000000",
    ):
        Page(tmp_path, "beef")
    campaign(tmp_path, 1)
    with pytest.raises(UsageError, match=r"ids of 2 runs in .* begin with it"):
        Page(tmp_path, "0")


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"findings": [], "layouts": {}})])
def test_a_summary_of_something_else_is_one_line(tmp_path: Path, text: str) -> None:
    """Not a bug of the checker."""
    campaign(tmp_path)
    with History(tmp_path).open() as db:
        db.execute("UPDATE summary SET json = ?", (text,))
    with pytest.raises(HistoryFailed, match="summary of run 0000000000000000"):
        Page(tmp_path)


def test_a_run_that_ended_without_a_summary_has_a_page(tmp_path: Path) -> None:
    """As one that was entered by an older equivcheck."""
    history = History(tmp_path)
    history.begin(run(0))
    history.end(run(0), Ended.FINISHED)
    assert "Not known" in Page(tmp_path).text
