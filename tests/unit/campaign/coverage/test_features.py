"""What counts as a feature of a scenario."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from hypothesis import given, settings

from equivcheck.campaign.coverage.features import features
from equivcheck.scenario import (
    DDP,
    SGD,
    AdamW,
    Axis,
    Data,
    Layer,
    Layout,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Resume,
    Scenario,
    StepLR,
    Training,
)
from equivcheck.strategies import scenarios

SCENARIO = Scenario(
    training=Training(
        model=Model(features=2, layers=(Layer(width=5, norm=Norm.RMS), Layer(width=1, bias=False))),
        data=Data(microbatches=(2, 4)),
        optimizer=AdamW(amsgrad=True, lr=0.01),
        schedule=StepLR(step_size=2),
        steps=3,
        seed=7,
    ),
    layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(no_sync=True, bucket_cap_mb=0.001),)),
    schedule_seed=9,
)


def names(scenario: Scenario) -> set[str]:
    """The features as text."""
    return {str(feature) for feature in features(scenario)}


def test_every_field_gives_features() -> None:
    """Choices and flags by value, numbers by bucket, nouns by class, and what tuples hold one by one; no seeds."""
    found = names(SCENARIO)
    assert {
        "training Training.optimizer AdamW",
        "training.optimizer Adam.amsgrad True",
        "training.optimizer Optimizer.lr other",
        "training.optimizer Optimizer.weight_decay default",
        "training.model Layer.norm RMS",
        "training.model Layer.norm None",
        "training.model Layer.bias False",
        "training.model Layer.width 3+",
        "training.model Layer.width 1",
        "training.model Model.layers of 2",
        "training.model Model.features 2",
        "training.data Data.microbatches of 2",
        "training.data Data.microbatches[] 3+",
        "training.schedule StepLR.step_size 2",
        "training Training.steps 3+",
        "training Training.clipping None",
        "training Training.groups of 0",
        "layout.parallelisms DDP.no_sync True",
        "layout.parallelisms DDP.bucket_cap_mb other",
        "layout.mesh Axis.name dp",
        "layout.mesh Axis.size 2",
        "layout.execution Execution.whole_step False",
        "resume Scenario.resume None",
    } <= found
    assert not [name for name in found if "seed" in name]
    assert not [name for name in found if name.endswith((" Mesh", " Model", " Data", " Execution"))]


def test_the_layout_of_the_first_steps_counts_by_its_name() -> None:
    """Its options are not mixed up with those of the layout that ends the scenario."""
    first = Layout(mesh=Mesh(axes=(Axis(name="dp", size=4),)), parallelisms=(DDP(static_graph=True),))
    found = names(replace(SCENARIO, resume=Resume(layout=first, steps=2)))
    assert {"resume Scenario.resume ddp", "resume Resume.steps 2", "resume Resume.flatten_optimizer_state_dict False"} <= found
    assert "layout.parallelisms DDP.static_graph True" not in found
    assert "layout.parallelisms DDP.static_graph False" in found


def test_a_new_field_is_a_new_feature() -> None:
    """Nothing lists fields: a third party's noun is covered as it is."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Gossip(Parallelism):
        tag: ClassVar[str] = "gossip"
        axes: ClassVar[tuple[tuple[str, ...], ...]] = (("ring",),)
        eager: bool = False
        neighbours: int = 2

    layout = Layout(mesh=Mesh(axes=(Axis(name="ring", size=2),)), parallelisms=(Gossip(eager=True),))
    found = names(replace(SCENARIO, layout=layout))
    assert {"layout.parallelisms Gossip.eager True", "layout.parallelisms Gossip.neighbours 2"} <= found


def test_optimizers_share_what_they_inherit() -> None:
    """A flag of all optimizers is one feature, whichever has it."""
    other = replace(SCENARIO, training=replace(SCENARIO.training, optimizer=SGD(maximize=True)))
    assert "training.optimizer Optimizer.maximize True" in names(other)


@settings(max_examples=10)
@given(scenarios())
def test_features_are_of_the_scenario_alone(scenario: Scenario) -> None:
    """Seeds change none, and a scenario has some of each part, of parallelisms where one of them has options."""
    assert features(scenario) == features(replace(scenario, schedule_seed=1))
    parts = {feature.part for feature in features(scenario)}
    assert {"training", "training.model", "layout.mesh", "resume"} <= parts
    assert ("layout.parallelisms" in parts) == any(fields(each) for each in scenario.layout.parallelisms)
