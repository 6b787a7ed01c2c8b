"""The property of resuming: what is saved under one layout and goes on under another is as if it were never interrupted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.tensor import DTensor

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.composition import resume
from equivcheck.layouts.composition.running import Runner
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    Adam,
    Axis,
    CosineAnnealingLR,
    Data,
    Distribution,
    Execution,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Parallelism,
    ParameterGroup,
    ParameterSelection,
    Pipeline,
    Resume,
    StepLR,
    Training,
)
from equivcheck.strategies import scenarios, trainings
from equivcheck.system.temporary_folder import NoSpace
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace import differences as verdict
from support.fresh import drawn_afresh
from support.supported import require_supported
from support.verdicts import first_divergence

SIM_EXAMPLES = max(10, settings().max_examples // 10)
GLOO_EXAMPLES = 6
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
RESUMED = {
    "trainings": trainings(steps=st.sampled_from((2, 3, 4))),
    "resumes": st.just(True),
    "executions": st.just(Execution()),
}


def assert_resumed_right(scenario: Scenario, world: str) -> None:
    """A scenario of two layouts is equivalent; one that could not be given a second is left to other tests."""
    if scenario.resume is not None:
        check(scenario, world=world).assert_no_finding()


@drawn_afresh(scenarios(max_ranks=6, **RESUMED), examples=SIM_EXAMPLES)
def test_resuming_in_sim_is_no_interruption(scenario: Scenario) -> None:
    """Whatever the two layouts and their numbers of ranks, every step, the state and the buffers are those of one device."""
    assert_resumed_right(scenario, "sim")


@pytest.mark.slow
@settings(UNHURRIED, max_examples=GLOO_EXAMPLES, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(scenarios(max_ranks=2, **RESUMED))
def test_resuming_over_gloo_is_no_interruption(scenario: Scenario) -> None:
    """Real processes write and read the checkpoint as simulated ranks do."""
    assert_resumed_right(scenario, "gloo")


TRAINING = Training(
    model=Model(features=4, layers=(Layer(width=6), Layer(width=4)), counter=True),
    data=Data(microbatches=(6,)),
    optimizer=Adam(),
    loss=Loss.MSE_SUM,
    schedule=StepLR(step_size=2),
    steps=3,
)
PIPELINE = Pipeline()
FULLY_SHARD = SPMD(distribution=Distribution.FULLY_SHARD)


def resumed(first: Parallelism, second: Parallelism, sizes: tuple[int, int] = (3, 2)) -> Scenario:
    """One step under the first parallelism, two under the second."""

    def layout(parallelism: Parallelism, size: int) -> Layout:
        return Layout(mesh=Mesh(axes=(Axis(name=parallelism.axes[0][0], size=size),)), parallelisms=(parallelism,))

    return Scenario(training=TRAINING, layout=layout(second, sizes[1]), resume=Resume(layout=layout(first, sizes[0])))


PAIRS = [(DDP(), FSDP2()), (FSDP2(), DDP()), (FSDP1(), FULLY_SHARD), (FULLY_SHARD, FSDP1(use_orig_params=False))]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_pairs_below_are_equivalent_without_a_fault(first: Parallelism, second: Parallelism) -> None:
    """What the faults of the tests below are planted in is right without them."""
    scenario = resumed(first, second)
    require_supported(scenario)
    assert check(scenario).outcome is Outcome.EQUIVALENT


def test_stages_with_groups_of_their_own_go_on_with_the_schedule() -> None:
    """What a schedule has for each parameter group is not that of the first rank, whose stage has other groups."""
    # Of the schedules this one reckons a rate from the rate before it.
    into, out_of = resumed(DDP(), PIPELINE, (2, 2)), resumed(PIPELINE, DDP(), (2, 2))
    groups = (ParameterGroup(select=ParameterSelection.FIRST_LAYER, lr_factor=0.5),)

    for scenario in (into, out_of):
        model = replace(scenario.training.model, counter=False)
        training = replace(scenario.training, model=model, groups=groups, schedule=CosineAnnealingLR(T_max=2), optimizer=SGD())
        resume = replace(scenario.resume, flatten_optimizer_state_dict=True) if scenario.resume else None
        check(replace(scenario, training=training, resume=resume)).assert_no_finding()


def without(part: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A part of the checkpoint is not read: what it is about starts anew."""
    load = state_dict_loader.load

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def rest(state: dict[str, Any], **options: Any) -> None:
            load({name: value for name, value in state.items() if name != part}, **options)

        monkeypatch.setattr(state_dict_loader, "load", rest)

    return plant


def with_rolled_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank loads of a sharded weight are the rows one further on."""
    load = resume.set_state_dict

    def rolled(*arguments: Any, model_state_dict: dict[str, Any], **parts: Any) -> None:
        weight = model_state_dict["layers.0.linear.weight"]
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local.copy_(local.roll(1, 0))
        load(*arguments, model_state_dict=model_state_dict, **parts)

    monkeypatch.setattr(resume, "set_state_dict", rolled)


@pytest.mark.parametrize(
    ("plant", "step", "phase"),
    [
        (without("optimizer"), 1, verdict.Phase.UPDATE),
        (without("schedule"), 2, verdict.Phase.UPDATE),
        (with_rolled_shards, 1, verdict.Phase.LOSS),
    ],
)
def test_what_is_lost_on_the_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], step: int, phase: verdict.Phase
) -> None:
    """A part of the checkpoint that is not loaded, or not where it belongs, diverges after the checkpoint and not before."""
    plant(monkeypatch)
    first = first_divergence(check(resumed(DDP(), FSDP2())))
    assert (first.step, first.phase) == (step, phase)


def twice_the_rate(setup: Setup) -> None:
    """A fault in the steps that the first layout runs."""
    if setup.after_training:
        setup.before_update.append(lambda optimizer, _step: optimizer.param_groups[0].update(lr=0.1))


def test_the_first_steps_are_compared_as_well() -> None:
    """A fault of the first layout is seen in its own steps, on its own ranks."""
    first = first_divergence(check(resumed(DDP(), FSDP2()), alter=twice_the_rate))
    assert (first.step, first.phase) == (0, verdict.Phase.UPDATE)


def failing(setup: Setup) -> None:
    """Raise in the second part."""
    if setup.before_training:
        raise RuntimeError("planted")


def failing_at_first(setup: Setup) -> None:
    """Raise in the first part."""
    if setup.after_training:
        raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("alter", "reason"), [(failing, "rank 0 raised"), (failing_at_first, "before the checkpoint, under ddp:")]
)
def test_the_checkpoint_is_gone_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alter: Callable[[Setup], None], reason: str
) -> None:
    """A rank that fails is a crash, which says in which part, and nothing is left on disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = check(resumed(DDP(), FSDP2()), alter=alter)
    assert found.outcome is Outcome.CRASHED
    assert found.reason.startswith(reason)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_has_no_space_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full the checker cannot run, whatever the ranks raise; the scenario is not to blame."""
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb"))
    with pytest.raises(NoSpace, match="No space left on device"):
        check(resumed(DDP(), FSDP2()), alter=failing_at_first)


def test_the_checkpoint_is_gone_after_an_interruption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C between the two parts leaves nothing on disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run, seen = Runner._part, []

    def interrupted(runner: Runner, layout: Layout, *arguments: Any) -> Any:
        if layout.name == "fsdp2":
            seen.extend(next(tmp_path.iterdir()).iterdir())
            raise KeyboardInterrupt
        return run(runner, layout, *arguments)

    monkeypatch.setattr(Runner, "_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(resumed(DDP(), FSDP2()))
    assert seen
    assert list(tmp_path.iterdir()) == []
