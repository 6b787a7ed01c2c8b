"""Repeated campaigns: modes, history, triage and merging."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from equivcheck.campaign import supervisor
from equivcheck.campaign.events import KeptFinding, Listener, Summary
from equivcheck.campaign.findings.finding import Finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.history.history import FILE
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.messages import Control
from equivcheck.checking.kinds import verdict_on
from equivcheck.cli import main
from equivcheck.cli.findings import replay
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome, Verdict
from unit.campaign import fakes

OLD, NEW = fakes.diverged(fakes.scenario()), fakes.diverged(fakes.scenario(), tensor="layers.0.linear.bias")


def run(*arguments: object) -> Result:
    """Run a command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


class Nights:
    """Campaigns over one store that find and replay what a test chooses."""

    def __init__(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.found: tuple[CaseVerdict, ...] = ()
        self.shows = self.catches = True
        self.broken = ""
        monkeypatch.setattr(supervisor, "fuzz", self._fuzz)
        monkeypatch.setattr(replay, "check_again", self._checked)

    def fuzz(self, *options: str, found: tuple[CaseVerdict, ...] = (), shows: bool = True) -> Result:
        """Run a campaign with these findings; `shows` says if replays still fail."""
        self.found, self.shows = found, shows
        return run("fuzz", "--seconds", 1, "--seed", 3, "--store", self.store, *options)

    def _checked(self, kept: Finding, _world: str, _deadline: float, *, confirm: bool) -> Verdict:
        equivalent = Verdict(outcome=Outcome.EQUIVALENT, scenario=kept.verdict.scenario, world="sim")
        return kept.verdict if self.shows else equivalent

    def _fuzz(self, plan: Plan, store: FindingStore, listeners: Sequence[Listener], _crew: object) -> Summary:
        self.plan = plan
        findings = tuple(
            KeptFinding(fingerprint=fingerprint(each), path=store.folder(fingerprint(each)), verdict=each, kept=store.keep(each))
            for each in self.found
        )
        summary = Summary(
            plan=plan,
            seconds=1.0,
            tally=Tally(),
            findings=findings,
            store=store.path,
            broken=self.broken,
            control=Control(name="a_bug", wrong="Nothing.", examples=1, caught=self.catches),
        )
        for event in (*findings, summary):
            for listener in listeners:
                listener(event)
        return summary


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    """Campaigns over one store."""
    return Nights(tmp_path / "findings", monkeypatch)


def standings(result: Result) -> dict[str, str]:
    """Status by fingerprint, from JSON."""
    value: dict[str, Any] = json.loads(result.stdout)
    return {record["fingerprint"]: record["standing"] for record in value["standings"]}


def test_a_night_fails_on_what_is_new_or_back_again(nights: Nights) -> None:
    """A finding that is still there or fixed does not fail the next run; a regression does."""
    old = fingerprint(OLD)
    told = []
    for found, shows in [((OLD,), True), ((), True), ((), False), ((), True)]:
        result = nights.fuzz("--mode", "nightly", "--json", found=found, shows=shows)
        told.append((result.exit_code, standings(result)))
    assert told == [(1, {old: "new"}), (0, {old: "still there"}), (0, {old: "fixed"}), (1, {old: "back again"})]


def test_a_pull_request_fails_on_what_the_store_does_not_know(nights: Nights) -> None:
    """A finding that comes back was there before the change, so it does not fail the run."""
    nights.fuzz(found=(OLD,))
    nights.fuzz("--mode", "nightly", shows=False)
    assert nights.fuzz("--mode", "pr").exit_code == 0
    result = nights.fuzz("--mode", "pr", found=(NEW,))
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if "fails: " in line]
    assert line.strip().startswith(f"fails: new {fingerprint(NEW)}")


@pytest.mark.parametrize(
    ("found", "broken", "catches", "codes"),
    [
        ((), "", True, (0, 0)),
        ((OLD,), "", True, (0, 1)),
        ((OLD,), "RuntimeError: it broke", True, (3, 3)),
        ((OLD,), "", False, (3, 3)),
    ],
    ids=["nothing", "findings", "a checker that breaks", "a control that is missed"],
)
def test_a_first_look_fails_only_if_the_checker_does(
    nights: Nights, found: tuple[Verdict, ...], broken: str, catches: bool, codes: tuple[int, int]
) -> None:
    """`--mode explore` has exit code 0 with findings; 3 stays 3."""
    nights.broken, nights.catches = broken, catches
    results = nights.fuzz("--mode", "explore", found=found), nights.fuzz(found=found)
    assert tuple(result.exit_code for result in results) == codes
    assert all(("DIVERGED" in result.stdout) is bool(found) for result in results)


def test_findings_in_tensor_programs_may_be_told_without_failing(nights: Nights) -> None:
    """`--fail-on trainings` ignores findings in programs, but prints them in their own section."""
    in_program = verdict_on(fakes.program(1, "exp"), outcome=Outcome.CRASHED, world="sim", reason="it raises")
    assert nights.fuzz(found=(in_program,)).exit_code == 1
    assert nights.fuzz("--fail-on", "trainings", found=(in_program,)).exit_code == 0
    both = nights.fuzz("--fail-on", "trainings", found=(in_program, OLD))
    assert both.exit_code == 1
    assert both.stdout.index("1 finding in trainings:") < both.stdout.index("1 finding in tensor programs:")


@pytest.mark.parametrize(
    ("options", "trainings", "programs"),
    [
        ((), True, False),
        (("--programs",), False, True),
        (("--with-programs",), True, True),
        (("--layout", "ddp", "--with-programs"), True, True),
        (("--mode", "nightly"), True, True),
        (("--mode", "nightly", "--layout", "ddp"), True, False),
        (("--mode", "explore"), True, False),
    ],
)
def test_trainings_are_drawn_unless_something_else_is_asked_for(
    nights: Nights, options: tuple[str, ...], trainings: bool, programs: bool
) -> None:
    """Tensor programs are drawn on request and by nightly runs only, because they say nothing about a training."""
    nights.fuzz(*options)
    assert (nights.plan.strategy is not None, nights.plan.programs is not None) == (trainings, programs)


def test_an_accepted_finding_fails_nothing(nights: Nights) -> None:
    """It fails runs again after `--withdraw`."""
    mark = fingerprint(OLD)
    assert nights.fuzz(found=(OLD,)).exit_code == 1
    assert run("triage", "--store", nights.store).exit_code == 1
    accepted = run("triage", "--accept", mark[:5], "--reason", "told upstream", "--store", nights.store)
    assert accepted.exit_code == 0
    assert "accepted until" in accepted.stdout
    result = nights.fuzz(found=(OLD,))
    assert result.exit_code == 0
    assert "told upstream" in result.stdout
    assert run("triage", "--withdraw", mark, "--store", nights.store).exit_code == 1
    assert nights.fuzz(found=(OLD,)).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--accept", "0"), "--accept needs --reason"),
        (("--reason", "because"), "--accept needs --reason"),
        (("--accept", "0", "--reason", "because"), "is not valid: no findings of"),
        (("--accept", "0", "--withdraw", "0", "--reason", "because"), "--accept and --withdraw are not valid together"),
        (("--accept", "KNOWN", "--reason", "because", "--until", "2020-01-01"), "or later"),
        (("--accept", "KNOWN", "--reason", "because", "--until", "soon"), "does not match the format"),
    ],
)
def test_triage_refuses_with_one_line(nights: Nights, arguments: tuple[str, ...], error: str) -> None:
    """No finding is accepted if the arguments are invalid."""
    nights.fuzz(found=(OLD,))
    named = [argument.replace("KNOWN", fingerprint(OLD)) for argument in arguments]
    result = run("triage", *named, "--store", nights.store)
    assert result.exit_code == 2
    assert error in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert run("triage", "--store", nights.store).exit_code == 1


def test_triage_says_what_is_wrong_since_when_with_which_torch(nights: Nights) -> None:
    """Each finding has the first and last run that saw it."""
    nights.fuzz(found=(OLD,))
    nights.fuzz(found=(OLD,))
    assert OLD.reason in run("triage", "--store", nights.store).stdout
    (record,) = json.loads(run("triage", "--json", "--store", nights.store).stdout)["findings"]
    assert record["standing"] == "still there"
    assert record["first"]["run"] != record["last"]["run"]
    assert record["first"]["torch"]
    assert datetime.fromisoformat(record["first"]["began"]).tzinfo is UTC


def test_stores_of_two_machines_are_merged(nights: Nights, tmp_path: Path) -> None:
    """The merged store has all findings and runs; merging again adds nothing."""
    nights.fuzz("--shard", "1/2", found=(OLD,))
    first = nights.store
    nights.store = tmp_path / "second"
    nights.fuzz("--shard", "2/2", found=(OLD, NEW))
    merge = ("merge", first, nights.store, "--store", tmp_path / "all", "--json")
    (one, other), again = (json.loads(run(*merge).stdout)["merged"] for _ in range(2))
    assert (one["findings"]["new"], one["runs"]) == (1, 1)
    assert (other["findings"], other["runs"]) == ({"new": 1, "better": 0, "seen": 1}, 1)
    assert [(each["findings"]["seen"], each["runs"]) for each in again] == [(1, 0), (2, 0)]


def test_a_merge_that_cannot_be_does_nothing(tmp_path: Path) -> None:
    """The error is one line, and no store is changed."""
    FindingStore(tmp_path / "one").keep(OLD)
    result = run("merge", tmp_path / "one", tmp_path / "missing", "--store", tmp_path / "all")
    assert result.exit_code == 2
    assert "missing is not valid: no such folder" in result.stderr
    assert not tmp_path.joinpath("all").exists()


def test_a_history_that_cannot_be_used_is_told_before_the_campaign(nights: Nights) -> None:
    """The error names the file. If the history breaks later, only its own text is lost."""
    nights.store.mkdir()
    nights.store.joinpath(FILE).write_text("not a database " * 100)
    result = nights.fuzz(found=(OLD,))
    assert result.exit_code == 3
    assert result.stderr.splitlines() == [f"error: the history {nights.store / FILE} cannot be used: file is not a database"]
    assert FindingStore(nights.store).fingerprints() == ()


@pytest.mark.parametrize("text", ["3/2", "x"])
def test_a_shard_that_does_not_exist_is_a_usage_error(text: str) -> None:
    """The error has the expected form."""
    result = run("fuzz", "--seconds", 1, "--shard", text)
    assert result.exit_code == 2
    assert "Expected" in result.stderr


def test_a_shard_draws_something_else(nights: Nights) -> None:
    """Each shard prints its own seed, which repeats it."""
    seeds = {json.loads(nights.fuzz("--json", "--shard", shard).stdout)["seed"] for shard in ("1/3", "2/3", "3/3", "1/1")}
    assert len(seeds) == 4
    assert 3 in seeds
