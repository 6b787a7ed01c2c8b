"""What batches are drawn from."""

from __future__ import annotations

from itertools import groupby, islice

from equivcheck.campaign.plan import Plan
from equivcheck.campaign.workers.turns import Source, sources
from equivcheck.layouts.composition.registry import layout_names
from unit.campaign import fakes

NUM_BATCHES = 10 * len(layout_names()) * 10 // 3 + 10
"""Of these three in ten have one layout alone: ten of each, and a few of the first again."""


def of(plan: Plan, worker: int = 0) -> list[Source]:
    """The first batches of a worker."""
    return list(islice(sources(plan, worker), NUM_BATCHES))


def plan_with(seed: int = 0, **changes: object) -> Plan:
    """A plan of fakes."""
    return Plan(num_checks=1, seed=seed, strategy=fakes.some_scenarios, **changes)  # type: ignore[arg-type]


def test_all_layouts_have_batches_of_their_own_alike() -> None:
    """A campaign over all layouts goes into one for ten batches, then into the next."""
    focused = [source.focus for source in of(plan_with()) if source.focus]
    stays = [(name, len(tuple(batches))) for name, batches in groupby(focused[: 10 * len(layout_names())])]
    assert sorted(stays) == sorted((name, 10) for name in layout_names())


def test_those_batches_draw_that_layout_alone() -> None:
    """The strategy of the plan is asked for it by name."""
    asked: list[tuple[str, ...]] = []

    def strategy(plan: Plan) -> object:
        asked.append(plan.layouts)
        return fakes.some_scenarios(plan)

    plan = Plan(num_checks=1, seed=0, layouts=("ddp", "spmd"), strategy=strategy)  # type: ignore[arg-type]
    of(plan)
    assert asked[0] == ("ddp", "spmd")
    assert sorted(asked[1:]) == [("ddp",), ("spmd",)]


def test_a_campaign_of_one_layout_has_no_such_batches() -> None:
    """It goes into nothing else."""
    assert not any(source.focus for source in of(plan_with(layouts=("ddp",))))


def test_workers_begin_with_other_layouts_and_seeds_with_other_orders() -> None:
    """So that a short campaign goes into several, and nights into different ones."""
    workers = {next(source.focus for source in of(plan_with(num_workers=2), worker) if source.focus) for worker in (0, 1)}
    seeds = {next(source.focus for source in of(plan_with(seed)) if source.focus) for seed in range(20)}
    assert len(workers) == 2
    assert len(seeds) > 5


def test_the_seed_decides_the_order() -> None:
    """What a worker draws is the same for the same plan."""
    assert [source.focus for source in of(plan_with(3))] == [source.focus for source in of(plan_with(3))]
