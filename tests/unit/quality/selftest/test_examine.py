"""One mutant examined: what is counted, and what is left."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.campaign.batches import batch_seed
from equivcheck.campaign.findings.size import settings_of
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.quality.selftest.examine import Effort, examine, has_effect
from equivcheck.quality.selftest.result import MutantResult
from equivcheck.scenario import DDP, SGD, Axis, Data, Layer, Layout, Mesh, Model, Scenario, Training
from unit.quality.selftest import wrong

FEW = Effort(examples=12)
SCENARIO = Scenario(
    training=Training(model=Model(features=2, layers=(Layer(width=2),)), data=Data(microbatches=(2,)), steps=2),
    layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),)),
)


def test_a_mutant_is_reached_caught_and_shrunk_to_the_least_that_shows_it() -> None:
    """Two ranks, one layer and two steps are left of one that shows with several ranks from the second step on."""
    told: list[MutantResult] = []
    row = examine(wrong.mutant("doubled"), Effort(examples=40, reached_after_catch=2), told.append)
    assert row.caught == row.reachable >= 3
    assert sum(each.reachable for each in row.layouts) == sum(each.caught for each in row.layouts) == row.reachable
    assert (row.undecided, row.num_missed) == (0, 0)
    assert 0 < row.examples <= row.drawn <= 40
    assert row.shrunk is not None
    assert (row.shrunk.ranks, row.shrunk.layers, row.shrunk.steps, row.shrunk.widths) == (2, 1, 2, (1, 1))
    assert row.shrunk.is_small
    assert row.shrunk.options == ()
    assert row.shrunk.outcome is Outcome.DIVERGED
    assert [one.drawn for one in told if one.shrunk is None] == list(range(1, row.drawn + 1))


def test_what_changes_nothing_is_never_reached() -> None:
    """No scenario counts as reachable, whether the fault does nothing or nothing of it applies."""
    nothing = examine(wrong.mutant("nothing", plant=wrong.change_nothing), FEW)
    nowhere = examine(wrong.mutant("nowhere", applies=lambda _scenario: False), FEW)
    for row in (nothing, nowhere):
        assert (row.drawn, row.reachable, row.caught, row.survivor) == (12, 0, 0, None)


def test_what_no_check_can_see_survives() -> None:
    """A change within rounding is reached and not caught, and a scenario is there to look at."""
    row = examine(wrong.mutant("digit", plant=wrong.change_a_last_digit), FEW)
    assert row.reachable > row.caught == 0
    assert row.survivor is not None
    assert row.num_missed == row.reachable - row.undecided
    assert sum(each.undecided for each in row.layouts) == row.undecided
    assert row.shrunk is None


def test_equal_seeds_draw_equal_scenarios() -> None:
    """The seed and the name decide what is drawn."""
    rows = [examine(wrong.mutant("digit", plant=wrong.change_a_last_digit), Effort(examples=3, seed=seed)) for seed in (1, 1)]
    assert rows[0].survivor == rows[1].survivor is not None
    assert batch_seed(1, 2) != batch_seed(2, 2)


def test_a_bit_is_enough_to_be_reached() -> None:
    """The least change of a number counts, a scenario in which a fault lies idle does not."""
    assert has_effect(SCENARIO, wrong.mutant("digit", plant=wrong.change_a_last_digit), 5.0)
    assert not has_effect(SCENARIO, wrong.mutant("nothing", plant=wrong.change_nothing), 5.0)


def test_the_optimizer_left_is_named() -> None:
    """Settings that are not as plain as can be are told in words."""
    training = replace(
        SCENARIO.training, optimizer=SGD(momentum=0.9), model=Model(features=2, layers=(Layer(width=2, bias=False),))
    )
    layout = replace(SCENARIO.layout, parallelisms=(DDP(no_sync=True),))
    assert settings_of(replace(SCENARIO, training=training, layout=layout)) == (
        "model.layers[0].bias False",
        "optimizer SGD",
        "optimizer.momentum 0.9",
        "ddp.no_sync True",
    )
