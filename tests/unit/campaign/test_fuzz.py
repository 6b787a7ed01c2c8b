"""Campaigns with checks that find, die, hang and break."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from equivcheck.campaign import supervisor
from equivcheck.campaign.events import Event, KeptFinding, Listener, Started, Summary, Ticked
from equivcheck.campaign.findings.example import is_shrunk
from equivcheck.campaign.findings.store import FindingStore, Kept
from equivcheck.campaign.plan import Check, Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.workers.process import CheckingProcess
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.worlds.failure import RankState
from support.processes import children_of
from unit.campaign import fakes

pytestmark = pytest.mark.usefixtures("workers_are_forked")

STUCK_SECONDS = 1.5


def plan(check: Check, **changes: object) -> Plan:
    """A short plan of one worker that draws from the fakes."""
    values: dict[str, object] = {
        "num_checks": 20,
        "seed": 0,
        "strategy": fakes.some_scenarios,
        "check": check,
    }
    return Plan(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> FindingStore:
    """An empty store."""
    return FindingStore(tmp_path / "findings")


def until(condition: Callable[[Ticked], bool]) -> Listener:
    """Interrupt the campaign, as Ctrl-C does, as soon as it is so far; however long that takes."""
    sent = False

    def listen(event: Event) -> None:
        nonlocal sent
        if isinstance(event, Ticked) and not sent and condition(event):
            sent = True  # a second signal would not wait for a summary
            signal.raise_signal(signal.SIGINT)

    return listen


@pytest.mark.usefixtures("workers_are_new")
def test_does_as_many_checks_as_it_is_to_do(store: FindingStore) -> None:
    """Without findings a campaign counts what it checked, over all workers, and keeps nothing."""
    before = set(children_of(os.getpid()))
    summary = fuzz(plan(fakes.fine, num_workers=2, num_checks=21), store)
    assert summary.tally.outcomes == {("ddp", Outcome.EQUIVALENT): 21}
    assert summary.findings == ()
    assert not summary.broken
    assert set(children_of(os.getpid())) == before


def test_takes_its_time_and_ends_by_itself(store: FindingStore) -> None:
    """Where nothing but its time ends a campaign, it takes all of that."""
    summary = fuzz(plan(fakes.fine, num_checks=None, seconds=1.0), store)
    assert summary.seconds >= 1.0
    assert not summary.interrupted


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns stop their workers soon after the end of the time."""
    monkeypatch.setattr(supervisor, "_QUIET_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "_FAILED_SECONDS", 0.4)
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.2)


@pytest.mark.usefixtures("no_patience")
def test_a_check_that_goes_on_longer_than_the_time_is_stopped(store: FindingStore) -> None:
    """It is counted, and is no finding: nobody knows what it would have come to."""
    before = set(children_of(os.getpid()))
    summary = fuzz(plan(fakes.hangs, num_checks=None, seconds=0.5), store)
    assert (summary.num_cut_off, summary.tally.num_checks) == (1, 0)
    assert (summary.findings, summary.broken, summary.interrupted) == ((), "", False)
    assert set(children_of(os.getpid())) == before


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (fakes.found_then_hangs, "not fully shrunk: the campaign ended first"),
        (fakes.crashes_then_hangs, "(not checked again: the campaign ended first)"),
    ],
    ids=["while it is shrunk", "before it is checked again"],
)
@pytest.mark.usefixtures("no_patience", "workers_are_new")
def test_a_finding_at_the_end_of_the_time_is_kept_and_marked(
    store: FindingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check, told: str
) -> None:
    """The end of the time costs its shrinking, and not the finding."""
    monkeypatch.setenv(fakes.ONCE, str(tmp_path / "once"))
    (finding,) = fuzz(plan(check, num_checks=None, seconds=5.0), store).findings
    assert told in "\n".join(finding.verdict.evidence())
    assert store.load(finding.fingerprint).verdict == finding.verdict


def test_a_finding_that_was_shrunk_has_no_mark(store: FindingStore) -> None:
    """The mark that it had at first is gone, in the summary and on disk."""
    (finding,) = fuzz(plan(fakes.wide_diverges), store).findings
    assert is_shrunk(finding.verdict)
    assert is_shrunk(store.load(finding.fingerprint).verdict)


def test_the_same_seed_checks_the_same(tmp_path: Path) -> None:
    """However long a machine takes for it, so many checks reach the same pairs of features."""
    first, second = (fuzz(plan(fakes.fine, num_workers=2), FindingStore(tmp_path / name)) for name in ("first", "second"))
    assert first.tally.reach.drawn_pairs.rows == second.tally.reach.drawn_pairs.rows


def test_no_scenario_is_checked_twice(store: FindingStore) -> None:
    """When there is nothing new to draw, a worker checks nothing, and is not taken to be stuck."""
    checked: list[float] = []

    def waited(event: Ticked) -> bool:
        if event.tally.num_checks == 2:
            checked.append(event.seconds)
        return bool(checked) and event.seconds > checked[0] + 2 * STUCK_SECONDS

    scarce = plan(fakes.fine, strategy=fakes.two_scenarios, num_checks=3, deadline=0.5, stuck_seconds=STUCK_SECONDS)
    summary = fuzz(scarce, store, [until(waited)])
    assert summary.tally.num_checks == 2
    assert summary.tally.not_repeated == 0
    assert summary.findings == ()


def test_a_finding_is_kept_once_and_shrunk(store: FindingStore) -> None:
    """Of a fault that shows in most scenarios one finding is left, with the smallest scenario that shows it."""
    summary = fuzz(plan(fakes.wide_diverges), store)
    (finding,) = summary.findings
    assert finding.verdict.scenario == fakes.scenario(width=3, ranks=1)
    assert finding.kept is Kept.NEW
    assert store.load(finding.fingerprint).verdict == finding.verdict
    assert summary.tally.fingerprints[finding.fingerprint] > 1
    assert summary.tally.num_shrinking >= 5


@pytest.mark.parametrize(
    ("check", "words"),
    [(fakes.wide_diverges, "diverged on gloo too"), (fakes.wide_diverges_in_sim, "not seen on gloo: equivalent there")],
    ids=["confirmed", "not confirmed"],
)
def test_what_is_left_of_a_finding_runs_in_another_world(store: FindingStore, check: Check, words: str) -> None:
    """The shrunk scenario is checked on processes too, and the finding that is kept says what came of it."""
    summary = fuzz(plan(check), store)
    (finding,) = summary.findings
    assert finding.verdict.confirmed == words
    assert finding.kept is Kept.NEW
    assert store.load(finding.fingerprint).verdict == finding.verdict
    assert words in (finding.path / "README.md").read_text()


def test_a_second_campaign_continues(store: FindingStore) -> None:
    """What an earlier campaign left is not new to the next one."""
    for expected in (Kept.NEW, Kept.SEEN):
        (finding,) = fuzz(plan(fakes.wide_diverges), store).findings
        assert finding.kept is expected
    assert store.fingerprints() == (finding.fingerprint,)


@pytest.mark.parametrize(
    ("check", "how"),
    [(fakes.long_exits, "exited with code 7"), (fakes.long_is_killed, "was killed by SIGSEGV")],
    ids=["exit", "signal"],
)
def test_a_worker_that_dies_is_a_finding_and_is_replaced(store: FindingStore, check: Check, how: str) -> None:
    """The death of a worker costs one verdict, which carries the scenario that caused it; those in its place find it again."""
    summary = fuzz(
        plan(check, num_checks=1000), store, [until(lambda event: max(event.tally.fingerprints.values(), default=0) > 1)]
    )
    (finding,) = summary.findings
    assert finding.verdict.outcome is Outcome.CRASHED
    assert finding.verdict.scenario.training.steps == 5
    assert how in finding.verdict.reason
    assert summary.tally.fingerprints[finding.fingerprint] > 1
    assert not summary.broken


def test_what_could_not_be_checked_again_is_kept_and_says_so(store: FindingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before it is known whether a death repeats, a campaign loses nothing and claims nothing."""
    deaths: list[CheckingProcess] = []
    read = CheckingProcess.death

    def death(worker: CheckingProcess) -> Verdict | None:
        deaths.append(worker)
        return read(worker)

    monkeypatch.setattr(CheckingProcess, "death", death)
    (finding,) = fuzz(plan(fakes.long_exits, num_checks=1000), store, [until(lambda _event: bool(deaths))]).findings
    assert finding.verdict.reason.endswith("(not checked again: the campaign ended first)")


@pytest.mark.parametrize("check", [fakes.long_is_killed_once, pytest.param(fakes.long_crashes_once, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("workers_are_new")
def test_what_does_not_repeat_alone_is_no_finding(
    store: FindingStore, check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that somebody kills, and ranks that fail once, are counted, and the scenario is innocent."""
    monkeypatch.setenv(fakes.ONCE, str(tmp_path / "once"))
    summary = fuzz(plan(check, num_checks=60), store)
    assert (summary.findings, summary.broken) == ((), "")
    assert summary.tally.not_repeated == 1
    assert summary.tally.outcomes == {("ddp", Outcome.EQUIVALENT): summary.tally.num_checks}
    assert store.fingerprints() == ()


@pytest.mark.slow
def test_a_worker_that_is_stuck_is_a_finding_with_its_stack(store: FindingStore) -> None:
    """A check that never ends is given up, and the verdict says where it was."""
    hanging = plan(fakes.long_hangs, num_checks=1000, deadline=0.5, stuck_seconds=STUCK_SECONDS)
    summary = fuzz(hanging, store, [until(lambda event: bool(event.tally.fingerprints))])
    (finding,) = summary.findings
    assert finding.verdict.outcome is Outcome.HUNG
    assert finding.verdict.scenario.training.steps == 5
    assert finding.verdict.failure is not None
    assert finding.verdict.failure.reports[0].state is RankState.RUNNING
    assert "long_hangs" in finding.verdict.failure.reports[0].stack


@pytest.mark.usefixtures("workers_are_new")
def test_a_worker_with_a_rank_that_cannot_be_stopped_is_replaced(
    store: FindingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in which a given-up rank still runs checks nothing more: each check is one of a process of its own."""
    pids = tmp_path / "pids"
    monkeypatch.setenv(fakes.PIDS, str(pids))
    summary = fuzz(plan(fakes.leaves_a_thread, num_checks=3), store)
    found = pids.read_text().split()
    assert len(found) == len(set(found)) == 3
    assert (summary.findings, summary.broken) == ((), "")


def test_a_check_that_raises_ends_the_campaign(store: FindingStore) -> None:
    """A broken checker is no finding: the campaign ends and says what was raised, on which scenario."""
    summary = fuzz(plan(fakes.raises), store)
    assert summary.broken.startswith("RuntimeError: no such thing")
    assert "Scenario(training=" in summary.broken
    assert summary.tally.num_checks == 0
    assert summary.findings == ()


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (fakes.does_not_start, "the ranks of sim could not join: no backend"),
        (fakes.has_no_space, "temporary files cannot be written in /nowhere"),
    ],
)
def test_what_the_machine_lacks_ends_the_campaign_in_one_line(store: FindingStore, check: Check, told: str) -> None:
    """It says nothing about a scenario, so nothing is kept, and no traceback says more."""
    summary = fuzz(plan(check), store)
    assert summary.broken.strip() == told
    assert summary.findings == ()


def test_a_worker_that_cannot_start_ends_the_campaign(store: FindingStore) -> None:
    """A worker that dies before its first check is not replaced for ever, and what it printed is shown."""
    summary = fuzz(plan(fakes.fine, strategy=fakes.dies_at_import), store)
    assert "the disk is on fire" in summary.broken


@pytest.mark.usefixtures("workers_are_new")
def test_a_worker_that_is_lost_at_its_start_is_replaced(
    store: FindingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed before its first check ends no campaign."""
    monkeypatch.setenv(fakes.ONCE, str(tmp_path / "once"))
    summary = fuzz(plan(fakes.fine, strategy=fakes.dies_at_import_once), store)
    assert not summary.broken
    assert summary.tally.num_checks == 20


def test_listeners_hear_everything_in_order(store: FindingStore) -> None:
    """Listeners are told of the start, of progress, of findings, and last of the summary."""
    heard: list[Event] = []
    summary = fuzz(plan(fakes.wide_diverges), store, [heard.append])
    assert isinstance(heard[0], Started)
    assert heard[-1] is summary
    assert any(isinstance(event, Ticked) for event in heard)
    assert any(isinstance(event, KeptFinding) for event in heard)
    assert [type(event) for event in heard].count(Summary) == 1
