"""How often what may end as a known issue is checked, and what is checked instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from equivcheck.campaign.batches import FaultShown
from equivcheck.campaign.findings.store import FindingStore
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.selection.avoidance import KNOWN_SHARE, Avoidance, Candidate, avoiding_all
from equivcheck.campaign.supervisor import fuzz
from equivcheck.campaign.workers import worker
from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.oracle.known_issues.known import could_show
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.programs.nouns import Leaf, Operation, TensorProgram
from equivcheck.programs.run.known.on_file import ON_FILE
from equivcheck.programs.verdict import ProgramVerdict
from equivcheck.scenario import Scenario
from equivcheck.worlds.workers.link import SupervisorLink
from unit.campaign import fakes

HEALTHY = fakes.scenario()
BROKEN = fakes.static_graph()
"""It could show one issue, `fakes.STATIC_GRAPH`."""
NUM_CHECKS = 100


def outcomes(drawn: Scenario, judge: Callable[[Candidate], Verdict]) -> Counter[bool]:
    """How many of a hundred draws of one scenario were checked as they are, and how many changed."""
    avoidance, changed = Avoidance(), Counter[bool]()
    for _ in range(NUM_CHECKS):
        candidate = avoidance.candidate(drawn)
        assert candidate is not None
        changed[bool(candidate.avoided)] += 1
        avoidance.count(candidate, judge(candidate))
    return changed


def shows(candidate: Candidate) -> Verdict:
    """KNOWN wherever an issue could show."""
    return fakes.known_if_it_could_show(candidate.case, world="sim", deadline=1.0)


def mended(candidate: Candidate) -> Verdict:
    """EQUIVALENT, whatever could show."""
    return Verdict(outcome=Outcome.EQUIVALENT, scenario=candidate.case, world="sim")


def test_what_shows_a_known_issue_is_a_small_share_of_checks() -> None:
    """The first is checked as it is, and so is one in ten; the others avoid the issue."""
    changed = outcomes(BROKEN, shows)
    assert 1 <= changed[False] <= KNOWN_SHARE * NUM_CHECKS
    assert outcomes(HEALTHY, shows) == {False: NUM_CHECKS}


def test_what_no_longer_shows_is_not_avoided() -> None:
    """An issue that torch has mended costs no check, so its scenarios are soon checked like others."""
    assert outcomes(BROKEN, mended)[False] >= NUM_CHECKS - 5


def test_shares_are_those_of_layouts() -> None:
    """What one layout has shown leaves another its own share; an issue that was met in one is new in none."""
    avoidance = Avoidance()
    other = fakes.static_graph(tensor_parallel=True)
    for drawn in (BROKEN, other):
        candidate = avoidance.candidate(drawn)
        assert candidate is not None
        avoidance.count(candidate, shows(candidate))
    assert not candidate.could_show
    for _ in range(20):
        avoidance.count(Candidate(case=other), mended(Candidate(case=other)))
    assert avoidance.candidate(other) == Candidate(case=other, could_show=frozenset((fakes.STATIC_GRAPH,)))
    assert avoidance.candidate(BROKEN) == avoiding_all(BROKEN)


def test_what_ends_as_one_issue_tells_nothing_of_others() -> None:
    """Nor does what could not be decided tell of any."""
    candidate = Candidate(case=BROKEN, could_show=frozenset(("one", "other")))
    verdict = Verdict(outcome=Outcome.KNOWN, scenario=BROKEN, world="sim", known="one")
    assert candidate.issues_decided_by(verdict) == {"one"}
    assert candidate.issues_decided_by(mended(candidate)) == {"one", "other"}
    assert not candidate.issues_decided_by(Verdict(outcome=Outcome.INCONCLUSIVE, scenario=BROKEN, world="sim"))


def test_a_fault_behind_a_known_issue_is_found_and_shrunk(tmp_path: Path) -> None:
    """Where every scenario that is drawn could show the issue, what is wrong without it as well is a finding, and shrinks."""
    plan = Plan(num_checks=20, seed=0, strategy=fakes.static_graphs, check=fakes.wide_diverges_behind_a_known_issue)
    summary = fuzz(plan, FindingStore(tmp_path))
    (finding,) = summary.findings
    smallest = finding.verdict.scenario
    assert smallest.training.model.widths[1] == 3
    assert not could_show(smallest)
    tally = summary.tally
    assert 1 <= tally.known[fakes.STATIC_GRAPH] == tally.decided[fakes.STATIC_GRAPH] <= KNOWN_SHARE * 20
    assert tally.avoided == {fakes.STATIC_GRAPH: 20 - tally.known[fakes.STATIC_GRAPH]}


def test_what_shrinks_a_scenario_that_avoids_issues_avoids_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Hypothesis shrinks what it has drawn, its proposals are changed as that was, and those of another fault are not."""
    link, checked = fakes.RecordingLink(), list[Scenario]()

    def run_batch(_strategy: object, _seed: int, take: Callable[[Scenario], None]) -> None:
        if len(checked) > 0:
            link.stopped.set()
            return
        for width in (1, 5, 4, 3):
            with suppress(FaultShown):
                take(fakes.static_graph(width=width))

    def check(scenario: Scenario, **options: Any) -> Verdict:
        checked.append(scenario)
        return fakes.wide_diverges_behind_a_known_issue(scenario, **options)

    monkeypatch.setattr(worker, "run_batch", run_batch)
    plan = Plan(num_checks=1000, seed=0, confirm=False, check=check)
    recorder = Recorder.create()
    worker.Worker(plan, (0, 0), cast(SupervisorLink, link), recorder).fuzz(1e9, 1000)
    recorder.close()
    assert checked[0] == BROKEN
    proposed = [avoiding_all(fakes.static_graph(width=width)) for width in (5, 4, 3)]
    assert {each.case for each in proposed if each is not None} <= set(checked)
    assert not any(map(could_show, checked[1:]))


def test_what_may_show_in_any_operation_leaves_out_no_program() -> None:
    """However often it has shown: else nothing would be left to check."""
    program = TensorProgram(mesh=(2,), statements=(Leaf(shape=(4,), placements=("S(0)",)), Operation(name="exp")))
    known = next(each for each in ON_FILE if not each.operations)
    verdict = ProgramVerdict(outcome=Outcome.KNOWN, known=known.id, world="sim", program=program)
    avoidance = Avoidance()
    for _ in range(NUM_CHECKS):
        candidate = avoidance.candidate(program)
        assert candidate is not None
        avoidance.count(candidate, verdict)
