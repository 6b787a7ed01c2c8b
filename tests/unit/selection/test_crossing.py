"""What is worth more by parts of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivcheck.composition.limits import why_unsupported
from equivcheck.coverage.crossing import crossed
from equivcheck.coverage.reach import Reach
from equivcheck.scenario import SGD, AdamW, Resume, Scenario
from equivcheck.selection.crossing import Crossing
from equivcheck.selection.novelty import Novelty
from unit.campaign import fakes
from unit.selection.test_novelty import drawn, reached

ADAMW = replace(fakes.scenario(steps=3), training=replace(fakes.scenario(steps=3).training, optimizer=AdamW(amsgrad=True)))


def improved(some: list[Scenario], layout: str = "") -> list[Scenario]:
    """Those that are wanted, each with parts of those before it."""
    novelty, found = Novelty(), []
    for scenario in some:
        if novelty.wants(scenario):
            found.append(novelty.improved(scenario, layout))
            novelty.count(found[-1])
    return found


def test_parts_of_others_reach_further() -> None:
    """As many scenarios bring more pairs of features than without; all of them are within limits, and none compiles."""
    every = [scenario for scenario in drawn(300) if scenario.resume is None and not scenario.layout.execution.is_compiled]
    found = improved(every)
    novelty = Novelty()
    plain = [scenario for scenario in every if novelty.wants(scenario) and not novelty.count(scenario)]
    assert reached(found[:30]) > 1.1 * reached(plain[:30])
    assert {why_unsupported(scenario) for scenario in found} == {None}
    assert not any(scenario.layout.execution.is_compiled for scenario in found)


def test_a_layout_that_is_asked_for_stays() -> None:
    """Batches of one layout alone are of that, with parts of scenarios of others."""
    others, of_ddp = drawn(60), fakes.scenario()
    novelty = Novelty()
    for scenario in others:
        novelty.wants(scenario)
        novelty.count(scenario)
    found = novelty.improved(of_ddp, "ddp")
    assert found.layout.name == "ddp"
    assert found.training != of_ddp.training


@pytest.mark.parametrize(
    "scenario", [fakes.compiled(), replace(ADAMW, resume=Resume(layout=ADAMW.layout, steps=1))], ids=["compiled", "resumed"]
)
def test_what_costs_more_than_it_brings_stays_as_it_is(scenario: Scenario) -> None:
    """Parts of others in it would have to be looked through for limits of compilers, or of two layouts."""
    novelty = Novelty()
    for other in drawn(20):
        novelty.wants(other)
    assert novelty.improved(scenario) is scenario


def test_what_has_a_feature_that_lacks_pairs_gives_it() -> None:
    """The rarest feature is taken first: where nothing else is worth anything, it alone is."""
    crossing = Crossing(Reach())
    crossing.add(ADAMW)
    found = crossing.improved(fakes.scenario(steps=3), lambda scenario: float(scenario.training.optimizer == AdamW(amsgrad=True)))
    assert found == ADAMW


def test_a_part_that_is_the_same_or_does_not_fit_gives_no_scenario() -> None:
    """There is nothing to check anew."""
    plain = fakes.scenario(steps=3)
    assert crossed(plain, ADAMW, ("training", "optimizer")) == ADAMW
    assert crossed(plain, replace(plain, schedule_seed=1), ("training", "optimizer")) is None
    assert crossed(plain, ADAMW, ("training", "optimizer", "amsgrad")) is None
    assert plain.training.optimizer == SGD()
