"""What a campaign does when it loses one of several machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from equivcheck.campaign.events import Event, Summary
from equivcheck.campaign.findings.example import mark_not_shrunk
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.tally import Tally
from equivcheck.campaign.workers.crew import Node
from equivcheck.campaign.workers.messages import Control, Done, Found, Fuzz, Lost, MayShrink, NodeLost, Progress, Ready, TakeOver
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.worlds.workers.process import Ended
from unit.campaign import fakes

WIDE = fakes.diverged(fakes.scenario(width=3))
DIED = replace(WIDE, outcome=Outcome.CRASHED, divergence=None, reason="the process was killed")


@dataclass(kw_only=True, eq=False)
class ScriptedWorker:
    """A worker that says what a test has it say."""

    place: tuple[int, int]
    suspect: Verdict | None
    node: str
    done: bool = False
    heard: list[Any] = field(default_factory=list)

    def send(self, message: object) -> None:
        """Remember it."""
        self.heard.append(message)


Turn = Sequence[tuple[ScriptedWorker, Any]]
"""What workers say within a moment."""


class ScriptedCrew:
    """A crew on machines with room for one worker each, where all happens as a script has it."""

    def __init__(self, names: str, script: Callable[[ScriptedCrew], Iterator[Turn]]) -> None:
        self.nodes = [Node(name=name, num_workers=1) for name in names]
        self.workers: list[ScriptedWorker] = []
        self._turns = script(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing is left behind."""

    @property
    def has_room(self) -> bool:
        """Whether a machine that is left has no worker."""
        return any(not node.lost and not self._on(node.name) for node in self.nodes)

    def start(self, plan: Plan, place: tuple[int, int], suspect: Verdict | None = None) -> None:
        """Start one on the machine with the fewest."""
        node = min((node for node in self.nodes if not node.lost), key=lambda node: len(self._on(node.name)))
        self.workers.append(ScriptedWorker(place=place, suspect=suspect, node=node.name))

    def messages(self) -> Iterator[tuple[ScriptedWorker, Any]]:
        """The next turn of the script, which must not be over before the campaign."""
        for worker, message in next(self._turns):
            if isinstance(message, Ended | Lost):
                self.workers.remove(worker)
            yield worker, message

    def remove(self, worker: ScriptedWorker) -> None:
        """Forget one."""
        self.workers.remove(worker)

    def lose(self, name: str) -> Turn:
        """The loss of a machine."""
        gone = self._on(name)
        self.workers = [worker for worker in self.workers if worker not in gone]
        (node,) = [node for node in self.nodes if node.name == name]
        node.lost = "lost: it is unplugged"
        return [(worker, NodeLost(name=name, why="it is unplugged")) for worker in gone]

    def only(self, place: tuple[int, int]) -> ScriptedWorker:
        """The worker in a place."""
        (worker,) = [worker for worker in self.workers if worker.place == place]
        return worker

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of the workers."""
        return [worker.place for worker in self.workers]

    def _on(self, name: str) -> list[ScriptedWorker]:
        return [worker for worker in self.workers if worker.node == name]


def all_ready(crew: ScriptedCrew) -> Turn:
    """Everybody has started."""
    return [(worker, Ready()) for worker in crew.workers]


def checked(worker: ScriptedWorker) -> Turn:
    """It has done one check."""
    tally = Tally()
    tally.add(Verdict(outcome=Outcome.EQUIVALENT, scenario=fakes.scenario(), world="sim"), 0.1)
    return [(worker, Progress(tally=tally))]


def ends(worker: ScriptedWorker) -> Turn:
    """It has done what it was to do."""
    return [(worker, Done()), (worker, Ended())]


def to_the_end(crew: ScriptedCrew) -> Iterator[Turn]:
    """All workers end, and those that take their places, without another check."""
    while crew.workers:
        yield [said for worker in crew.workers for said in ends(worker)]


def campaign(
    tmp_path: Path, names: str, script: Callable[[ScriptedCrew], Iterator[Turn]], **changes: Any
) -> tuple[Summary, list[Event]]:
    """A campaign on these machines with two checks for each, and what it tells."""
    told: list[Event] = []
    values: dict[str, Any] = {
        "num_checks": 2 * len(names),
        "seed": 0,
        "num_workers": len(names),
        "strategy": fakes.some_scenarios,
    }
    plan = Plan(**(values | changes))
    return fuzz(plan, FindingStore(tmp_path / "findings"), [told.append], ScriptedCrew(names, script)), told


def test_what_a_lost_node_was_still_to_check_is_checked_where_a_core_is_free(tmp_path: Path) -> None:
    """Not sooner, as another process would take memory that nobody has counted on; what it had checked is not checked again."""

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, other = crew.workers
        yield all_ready(crew)
        yield checked(one)
        yield crew.lose(one.node)
        yield [*checked(other), *checked(other)]
        assert crew.places == [(1, 0)]
        yield ends(other)
        assert crew.places == [(0, 1)]
        yield all_ready(crew)
        (fuzz_order,) = crew.only((0, 1)).heard
        assert fuzz_order.num_checks == 1
        yield [*checked(crew.only((0, 1))), *ends(crew.only((0, 1)))]

    summary, told = campaign(tmp_path, "ab", script)
    assert summary.tally.num_checks == 4
    assert (summary.broken, summary.findings, summary.tally.not_repeated) == ("", (), 0)
    assert [(node.name, node.num_checks, node.lost) for node in summary.nodes] == [
        ("a", 1, "lost: it is unplugged"),
        ("b", 3, ""),
    ]
    assert [event for event in told if isinstance(event, NodeLost)] == [NodeLost(name="a", why="it is unplugged")]


def test_the_clock_does_not_wait_for_a_node_that_was_lost_at_its_start(tmp_path: Path) -> None:
    """Those that are left begin."""

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, other = crew.workers
        yield [(other, Ready())]
        assert other.heard == []
        yield crew.lose(one.node)
        assert isinstance(other.heard[0], Fuzz)
        yield from to_the_end(crew)

    campaign(tmp_path, "ab", script)


def test_what_was_being_checked_again_on_a_lost_node_is_checked_on_another_at_once(tmp_path: Path) -> None:
    """What may be a finding is neither lost nor left for later."""

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, other = crew.workers
        yield all_ready(crew)
        yield [(one, Lost(verdict=DIED, seconds=0.1, printed=""))]
        assert crew.only((0, 1)).suspect == DIED
        yield crew.lose(one.node)
        assert crew.only((0, 2)).suspect == DIED
        assert crew.only((0, 2)).node == other.node
        yield [(crew.only((0, 2)), Lost(verdict=DIED, seconds=0.1, printed=""))]
        yield from to_the_end(crew)

    summary, _ = campaign(tmp_path, "ab", script)
    assert [finding.verdict for finding in summary.findings] == [DIED]


@pytest.mark.parametrize("is_known", [True, False])
def test_the_control_of_a_lost_node_goes_on_elsewhere_at_once(tmp_path: Path, is_known: bool) -> None:
    """Without it a campaign would prove nothing; once it is known, what else that worker had to do can wait."""

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, _ = crew.workers
        yield all_ready(crew)
        if is_known:
            yield [(one, Control(name="nothing", wrong="Nothing.", caught=True))]
        yield crew.lose(one.node)
        assert crew.places == ([(1, 0)] if is_known else [(1, 0), (0, 1)])
        yield from to_the_end(crew)

    campaign(tmp_path, "ab", script, controls=lambda _: [fakes.mutant("nothing")])


def test_nobody_takes_the_place_of_a_worker_that_had_said_all(tmp_path: Path) -> None:
    """Its node was lost before its process had ended."""

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, other = crew.workers
        yield all_ready(crew)
        yield [(one, Done())]
        yield crew.lose(one.node)
        assert crew.places == [(1, 0)]
        yield ends(other)

    summary, _ = campaign(tmp_path, "ab", script)
    assert not summary.broken


def test_a_finding_is_shrunk_by_one_worker(tmp_path: Path) -> None:
    """By the first that finds it; another that does so goes on drawing."""

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, other = crew.workers
        yield all_ready(crew)
        yield [(one, Found(verdict=WIDE, asks=True))]
        assert one.heard[-1] == MayShrink(yes=True)
        yield [(other, Found(verdict=WIDE, asks=True))]
        assert other.heard[-1] == MayShrink(yes=False)
        yield from to_the_end(crew)

    campaign(tmp_path, "ab", script)


@pytest.mark.parametrize("is_done", [False, True])
def test_what_a_lost_node_was_shrinking_another_is_asked_to_shrink(tmp_path: Path, is_done: bool) -> None:
    """Unless it was shrunk by then: nobody else may ever find it."""
    to_be_shrunk = mark_not_shrunk(WIDE)

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, other = crew.workers
        yield all_ready(crew)
        yield [(one, Found(verdict=to_be_shrunk, asks=True))]
        if is_done:
            yield [(one, Found(verdict=WIDE))]
        yield crew.lose(one.node)
        assert other.heard[1:] == ([] if is_done else [TakeOver(verdict=to_be_shrunk)])
        yield from to_the_end(crew)

    campaign(tmp_path, "ab", script)


def test_a_campaign_that_has_lost_every_node_is_broken_and_keeps_what_it_found(tmp_path: Path) -> None:
    """It says so in a line, with the last of them."""

    def script(crew: ScriptedCrew) -> Iterator[Turn]:
        one, other = crew.workers
        yield all_ready(crew)
        yield [(one, Found(verdict=WIDE)), (other, Lost(verdict=DIED, seconds=0.1, printed=""))]
        yield crew.lose("a")
        yield crew.lose("b")
        yield ()

    summary, _ = campaign(tmp_path, "ab", script)
    assert summary.broken == "all cluster nodes are lost; the last was b: it is unplugged"
    assert [finding.verdict.outcome for finding in summary.findings] == [Outcome.DIVERGED, Outcome.CRASHED]
