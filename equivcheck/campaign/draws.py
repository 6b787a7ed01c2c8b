"""Scenarios as a campaign draws them, without any check."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from equivcheck.campaign.batches import Enough, batch_seed, run_batch
from equivcheck.campaign.plan import Plan
from equivcheck.scenario import Scenario


def draw(plan: Plan, take: Callable[[Scenario], None]) -> float:
    """Have scenarios taken for the plan's seconds, each once a batch, by one process; returns how long it took.

    They are those of the first worker of a campaign with that plan.
    """
    started = time.monotonic()
    strategy = plan.strategy(plan)

    def take_in_time(scenario: Scenario) -> None:
        if time.monotonic() - started >= plan.seconds:
            raise Enough
        take(scenario)

    for number in itertools.count():
        run_batch(strategy, batch_seed(plan.seed, 0, 0, number), take_in_time)
        if time.monotonic() - started >= plan.seconds:
            break
    return time.monotonic() - started
