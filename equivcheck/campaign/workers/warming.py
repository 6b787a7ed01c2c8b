"""Prepares the process from which workers are forked: all imports, and one small check for each layout."""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.campaign.batches import EndBatch, run_batch
from equivcheck.campaign.plan import Plan
from equivcheck.scenario import Scenario
from equivcheck.scenario.parallelisms import PARALLELISMS


def warm_up() -> None:
    """Prepare the process from which workers are forked: import everything needed for checks, and run each layout once.

    All threads end before this function returns, because a fork of the process does not copy threads.
    """
    from equivcheck.campaign.workers.serving import import_everything
    from equivcheck.checking.check import check
    from equivcheck.worlds.pool import close_worlds

    import_everything(Plan(num_checks=1, seed=0))
    for scenario in _plainest():
        check(scenario)
    close_worlds()


def _plainest() -> Iterator[Scenario]:
    """The first scenario that Hypothesis draws for each parallelism."""
    from equivcheck.strategies import scenarios

    for parallelism in PARALLELISMS:
        found: list[Scenario] = []

        def take(scenario: Scenario, found: list[Scenario] = found) -> None:
            found.append(scenario)
            raise EndBatch

        run_batch(scenarios(layouts=(parallelism.tag,)), 0, take)
        yield from found
