"""Findings in what was made of parts of several scenarios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from equivcheck.campaign import worker
from equivcheck.campaign.messages import Found
from equivcheck.campaign.plan import Plan
from equivcheck.campaign.recorder import Recorder
from equivcheck.scenario import Adam, ClipNorm, Scenario
from equivcheck.verdict.verdict import Verdict
from equivcheck.workers.link import Link
from unit.campaign import fakes


def diverges(scenario: Scenario, *, world: str, deadline: float, **options: object) -> Verdict:
    """Finds a fault that needs an optimizer and clipping which are never drawn together."""
    is_clipped_adam = isinstance(scenario.training.optimizer, Adam) and scenario.training.clipping is not None
    found = fakes.diverged(scenario, world=world) if is_clipped_adam else None
    return found or fakes.fine(scenario, world=world, deadline=deadline, **options)


def with_training(scenario: Scenario, **changes: Any) -> Scenario:
    """The same, trained otherwise."""
    return replace(scenario, training=replace(scenario.training, **changes))


def test_they_shrink_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would propose nothing that has both parts: single changes alone lead to the smallest that shows the fault."""
    link, parts = fakes.RecordingLink(), ({"optimizer": Adam(amsgrad=True)}, {"clipping": ClipNorm()})
    drawn = [with_training(fakes.scenario(width=width), **part) for width in range(3, 12) for part in parts]

    def run_batch(_strategy: object, _seed: int, take: Callable[[Scenario], None]) -> None:
        for scenario in drawn:
            take(scenario)  # what asks Hypothesis to shrink would be raised here
        link.stopped.set()

    monkeypatch.setattr(worker, "run_batch", run_batch)
    recorder = Recorder.create()
    plan = Plan(num_checks=1000, seed=0, confirm=False, check=cast(Any, diverges))
    worker.Worker(plan, (0, 0), cast(Link, link), recorder).fuzz(1e9, 1000)
    recorder.close()
    found = [message.verdict.case for message in link.sent if isinstance(message, Found)]
    assert found[-1] == with_training(fakes.scenario(ranks=1), optimizer=Adam(), clipping=ClipNorm())
    assert found[0] not in drawn
