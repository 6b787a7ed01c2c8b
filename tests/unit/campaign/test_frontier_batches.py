"""Batches beyond limits of torch: how many there are, what of them is checked, and how it is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.workers import worker
from equivcheck.campaign.workers.process import check_isolated
from equivcheck.campaign.workers.recorder import Recorder
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.verdict import Outcome, Verdict
from equivcheck.scenario import SPMD, Adamax, Axis, Implementation, Layout, Mesh, Scenario
from equivcheck.worlds.workers.link import SupervisorLink
from unit.campaign import fakes

HEADS_OR_HIDDEN = fakes.scenario()
USUAL, FRONTIER = "usual", "frontier"


def beyond_a_limit() -> Scenario:
    """SPMD with an optimizer that torch refuses there."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(SPMD(redistribute_gradients=False),))
    optimizer = Adamax(implementation=Implementation.FOREACH, maximize=True)
    return replace(HEADS_OR_HIDDEN, layout=layout, training=replace(HEADS_OR_HIDDEN.training, optimizer=optimizer))


@pytest.mark.torch(">=2.12", "earlier versions have no such limit")
def test_one_batch_in_ten_is_beyond_limits_and_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty batches the third and the thirteenth; what they draw within limits is left to the others."""
    link, batches, checked = fakes.RecordingLink(), list[str](), list[tuple[int, bool, Scenario]]()

    def run_batch(strategy: Any, _seed: int, take: Any) -> None:
        batches.append(strategy)
        for scenario in (HEADS_OR_HIDDEN, beyond_a_limit()) if strategy == FRONTIER else (HEADS_OR_HIDDEN,):
            take(scenario)
        if len(batches) == 20:
            link.stopped.set()

    def check(scenario: Scenario, *, beyond: bool = False, **_options: object) -> Verdict:
        checked.append((len(batches), beyond, scenario))
        limit = why_unsupported(scenario) or "" if beyond else ""
        outcome = Outcome.UNSUPPORTED if limit else Outcome.EQUIVALENT
        return Verdict(outcome=outcome, scenario=scenario, world="sim", beyond=limit)

    monkeypatch.setattr(worker, "run_batch", run_batch)
    plan = Plan(num_checks=1000, seed=0, strategy=_named(USUAL), frontier=_named(FRONTIER), check=check)
    recorder = Recorder.create()
    worker.Worker(plan, (0, 0), cast(SupervisorLink, link), recorder).fuzz(1e9, 1000)
    recorder.close()

    assert [number for number, strategy in enumerate(batches) if strategy == FRONTIER] == [2, 12]
    assert checked == [(1, False, HEADS_OR_HIDDEN), (3, True, beyond_a_limit())]  # neither is checked twice
    assert link.tally.outcomes == {("ddp", Outcome.EQUIVALENT): 1}
    assert link.tally.beyond == {Outcome.UNSUPPORTED: 1}
    assert link.tally.num_checks == 1


def _named(name: str) -> Any:
    return lambda _plan: name


def test_a_finding_beyond_limits_is_checked_again_beyond_them() -> None:
    """A process of its own is told that limits do not count."""
    verdict = check_isolated(beyond_a_limit(), world="sim", deadline=5.0, beyond=True, check=fakes.says_whether_beyond)
    assert verdict.beyond == "a limit"
    verdict = check_isolated(beyond_a_limit(), world="sim", deadline=5.0, check=fakes.says_whether_beyond)
    assert verdict.beyond == ""
