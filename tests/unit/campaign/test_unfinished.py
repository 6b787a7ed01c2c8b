"""Findings of which a part of the work failed: that costs no more than its own text."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from equivcheck.campaign.findings import finding as finding_module
from equivcheck.campaign.findings.example import is_shrunk, unmark_not_shrunk
from equivcheck.campaign.findings.finding import load_finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.campaign.plan import Plan, oracle_check
from equivcheck.campaign.shrinking.search import Shrinking
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.workers.messages import Found, MayShrink, TakeOver
from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.campaign.workers.worker import Worker
from equivcheck.cli import main
from equivcheck.diagnosis import explain
from equivcheck.errors import NotEquivalent
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict import verdict as verdict_module
from equivcheck.oracle.verdict.verdict import Verdict
from equivcheck.quality.selftest.examine import Effort, examine
from equivcheck.scenario import Scenario
from equivcheck.scenario.file_format.codec import to_json
from equivcheck.worlds.workers.link import SupervisorLink
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

FOUND = fakes.diverged(fakes.scenario(width=3))


class HeardLink:
    """The worker's end of a connection, that keeps what is said; whatever is asked may be shrunk."""

    def __init__(self) -> None:
        self.heard: list[Verdict] = []
        self.asked: list[object] = []
        self.stopped = threading.Event()

    def send(self, message: object) -> None:
        """Keep a finding; when something of the work on it has failed, the worker is to stop."""
        if isinstance(message, Found):
            self.heard.append(message.verdict)
            if unmark_not_shrunk(message.verdict).unfinished:
                self.stopped.set()

    def next(self) -> object:
        """The answer to whether it may be shrunk."""
        return MayShrink(yes=True)

    def pending(self) -> list[object]:
        """What a test has it ask for, once."""
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def link() -> HeardLink:
    """A link to a supervisor that listens."""
    return HeardLink()


@contextmanager
def worker(link: HeardLink, **changes: object) -> Iterator[Worker]:
    """A worker of a short campaign in this process."""
    values: dict[str, object] = {"num_checks": 500, "seed": 0, "strategy": fakes.some_scenarios, "check": fakes.wide_diverges}
    listening: SupervisorLink = link  # type: ignore[assignment]
    recorder = Recorder.create()
    yield Worker(Plan(**(values | changes)), (0, 0), listening, recorder)  # type: ignore[arg-type]
    recorder.close()


def broken(*_arguments: object, **_options: object) -> None:
    """Not as it should be."""
    raise TypeError("the catalogue is torn")


def test_what_another_has_found_is_shrunk_first(link: HeardLink) -> None:
    """A worker that takes over a finding of a machine that was lost makes it as small as what it finds itself."""
    large = fakes.diverged(fakes.scenario(width=20, steps=4, ranks=4, layers=3))
    link.asked = [TakeOver(verdict=large)]
    with worker(link, strategy=fakes.two_scenarios) as taking_over:
        taking_over.fuzz(float("inf"), 1)
    assert {found.case for found in link.heard} == {fakes.scenario(width=3, ranks=1)}
    assert is_shrunk(link.heard[-1])


def test_a_diagnosis_that_raises_leaves_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict says so in a line, and is the same finding."""
    monkeypatch.setattr(explain, "run_again", broken)
    told = explain.explained(FOUND)
    assert replace(told, unfinished="") == FOUND
    assert fingerprint(told) == fingerprint(FOUND)
    assert "  note:  diagnosis failed: TypeError: the catalogue is torn" in told.describe().splitlines()


def test_check_prints_the_finding_that_it_cannot_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code is that of a finding, and what cannot be confirmed is told as well."""

    def check(scenario: Scenario, *, world: str, **_options: object) -> Verdict:
        if world == "gloo":
            broken()
        return fakes.diverged(scenario)

    monkeypatch.setattr("equivcheck.checking.check.check", check)
    monkeypatch.setattr(explain, "run_again", broken)
    (file := tmp_path / "it").write_text(to_json(FOUND.scenario))
    result = CliRunner().invoke(main, ["check", str(file), "--confirm", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["fingerprint"] == fingerprint(FOUND)
    torn = "TypeError: the catalogue is torn"
    assert found["unfinished"] == f"diagnosis failed: {torn}; confirming on gloo failed: {torn}"


def test_an_error_of_a_test_is_that_of_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a diagnosis nor a description that raises hides from pytest what diverged."""
    monkeypatch.setattr(explain, "run_again", broken)
    monkeypatch.setattr(verdict_module, "divergence_lines", broken)
    with pytest.raises(NotEquivalent) as caught:
        FOUND.assert_no_finding()
    text = str(caught.value)
    assert "what: layers.0.linear.weight differs" in text
    assert "describing more failed: TypeError: the catalogue is torn" in text
    assert "Scenario(" in text


@pytest.mark.parametrize("part", ["__init__", "offer", "finish"])
def test_a_shrinker_that_raises_leaves_what_was_found_first(link: HeardLink, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The worker goes on to the end of its time."""
    monkeypatch.setattr(Shrinking, part, broken)
    with worker(link, confirm=False) as one:
        one.fuzz(math.inf, 500)
    assert {fingerprint(verdict) for verdict in link.heard} == {fingerprint(FOUND)}
    assert link.heard[-1].unfinished == "shrinking failed: TypeError: the catalogue is torn"


def test_a_worker_sends_what_it_cannot_explain(link: HeardLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest example goes to the supervisor with the reason in place of a diagnosis."""
    monkeypatch.setattr(explain, "run_again", broken)
    with worker(link, check=oracle_check, confirm=False) as one:
        one._smallest[fingerprint(FOUND)] = (9,)
        one._shrinking = Shrinking(FOUND, lambda scenario, coarse: FOUND, same=lambda _verdict: False, seconds=0.0)
        one._end_shrinking()
    assert link.heard[-1].unfinished == "diagnosis failed: TypeError: the catalogue is torn"


def test_a_world_that_cannot_confirm_leaves_the_finding(link: HeardLink) -> None:
    """That ranks of the other world do not start says nothing about what was found."""
    with worker(link, check=wide_diverges_where_gloo_is_broken) as one:
        one.fuzz(math.inf, 500)
    assert link.heard[-1].unfinished == "confirming on gloo failed: TypeError: the catalogue is torn"


def wide_diverges_where_gloo_is_broken(scenario: Scenario, *, world: str, deadline: float, **options: object) -> Verdict:
    """Finds in one world, and raises in the other."""
    if world == "gloo":
        broken()
    return fakes.wide_diverges(scenario, world=world, deadline=deadline, **options)


def test_a_text_for_people_that_raises_costs_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding is kept and reads back; its README says what failed."""
    monkeypatch.setattr(finding_module, "readme", broken)
    store = FindingStore(tmp_path)
    assert store.keep(FOUND) is Kept.NEW
    kept = load_finding(store.folder(fingerprint(FOUND)))
    assert kept.verdict == FOUND
    assert "this text failed: TypeError: the catalogue is torn" in (kept.path / "README.md").read_text()


def test_a_store_that_raises_ends_no_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises is told, with the finding, in the summary."""
    monkeypatch.setattr(FindingStore, "keep", broken)
    plan = Plan(num_checks=20, seed=0, strategy=fakes.some_scenarios, check=fakes.wide_diverges)
    summary = fuzz(plan, FindingStore(tmp_path))
    assert [found.fingerprint for found in summary.findings] == [fingerprint(FOUND)]
    assert summary.unkept == "keeping a finding failed: TypeError: the catalogue is torn"


@pytest.mark.slow
def test_a_mutant_that_cannot_be_explained_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was caught and shrunk is there, and the selftest says that the diagnosis failed."""
    monkeypatch.setattr(explain, "run_again", broken)
    row = examine(mutant("gradients_summed"), Effort(examples=20, reached_after_catch=0, shrink_seconds=0.0))
    assert row.is_killed
    assert row.shrunk is not None
    assert row.broken == "diagnosis failed: TypeError: the catalogue is torn"
