"""Tests for building optimizers and schedules."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from equivcheck.scenario import (
    SGD,
    Adam,
    CosineAnnealingLR,
    Data,
    ExponentialLR,
    Implementation,
    Layer,
    LinearLR,
    Model,
    Muon,
    Norm,
    Optimizer,
    ParameterGroup,
    ParameterSelection,
    Rprop,
    Schedule,
    StepLR,
    Training,
    ZeroGrad,
)
from equivcheck.scenario.optimizer import OPTIMIZERS
from equivcheck.system.choice import PrintableEnum
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material
from equivcheck.training.update.optimizer import build_optimizer, build_schedule

MODEL = Model(features=2, layers=(Layer(width=2, norm=Norm.LAYER), Layer(width=2), Layer(width=2, shares=1)))
MATRICES = Model(features=2, layers=(Layer(width=2, bias=False), Layer(width=3, bias=False)))
TRAINING = Training(model=MODEL, data=Data(microbatches=(2,)), optimizer=SGD(lr=0.1, weight_decay=0.3))
VECTORS, FIRST, ODD = (
    ParameterGroup(select=select, lr_factor=factor) for select, factor in zip(ParameterSelection, (2.0, 3.0, 4.0), strict=True)
)
STEPS = range(12)


def built(training: Training) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """Optimizer over new parameters, and their names by identity."""
    parameters = {name: values.clone().requires_grad_() for name, values in material(training).parameters.items()}
    return build_optimizer(training, parameters.items()), {id(parameter): name for name, parameter in parameters.items()}


def training_with(noun: Optimizer, **changes: Any) -> Training:
    """Training with another optimizer, and with a model that it supports."""
    return replace(TRAINING, optimizer=noun, model=MODEL if noun.updates_vectors else MATRICES, **changes)


def members(training: Training) -> list[set[str]]:
    """Parameter names in each of torch's groups, without ``layers.``."""
    optimizer, names = built(training)
    return [{names[id(parameter)].removeprefix("layers.") for parameter in group["params"]} for group in optimizer.param_groups]


def test_one_group_by_default() -> None:
    """Without groups, every parameter is in the default group."""
    assert members(TRAINING) == [{name.removeprefix("layers.") for name in material(TRAINING).parameters}]


@pytest.mark.parametrize(
    ("group", "taken"),
    [
        (VECTORS, {"0.norm.weight", "0.norm.bias", "0.linear.bias", "1.linear.bias", "2.linear.bias"}),
        (FIRST, {"0.norm.weight", "0.norm.bias", "0.linear.weight", "0.linear.bias"}),
        (ODD, {"1.linear.weight", "1.linear.bias"}),
    ],
)
def test_group_takes_what_it_selects(group: ParameterGroup, taken: set[str]) -> None:
    """A group has the selected parameters and the default group the rest."""
    everything = {name.removeprefix("layers.") for name in material(TRAINING).parameters}
    assert members(replace(TRAINING, groups=(group,))) == [everything - taken, taken]


@pytest.mark.parametrize("group", [VECTORS, FIRST, ODD])
def test_no_group_takes_a_scale(group: ParameterGroup) -> None:
    """The scale belongs to no layer and is not a vector, so it is in the default group."""
    own, *_ = members(replace(TRAINING, model=replace(TRAINING.model, scale=True), groups=(group,)))
    assert "scale" in own


def test_first_group_that_selects_takes() -> None:
    """A parameter that two groups select goes to the first."""
    assert members(replace(TRAINING, groups=(ODD, VECTORS)))[1:] == [
        {"1.linear.weight", "1.linear.bias"},
        {"0.norm.weight", "0.norm.bias", "0.linear.bias", "2.linear.bias"},
    ]


def test_empty_groups_are_left_out() -> None:
    """Empty groups are not passed to torch."""
    single = Training(model=Model(features=2, layers=(Layer(width=2),)), data=Data(microbatches=(2,)), groups=(ODD, FIRST))
    assert members(single) == [{"0.linear.weight", "0.linear.bias"}]


def test_groups_have_their_own_settings() -> None:
    """A group multiplies the learning rate and replaces the weight decay."""
    optimizer, _ = built(replace(TRAINING, groups=(ParameterGroup(lr_factor=2.0, weight_decay=0.7), FIRST)))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.1, 0.3),
        (0.2, 0.7),
        (pytest.approx(0.3), 0.0),
    ]


@pytest.mark.parametrize(("kind", "implementation"), [(kind, one) for kind in OPTIMIZERS for one in kind.implementations()])
def test_noun_becomes_the_class_of_its_name(kind: type[Optimizer], implementation: Implementation) -> None:
    """The torch class with the same name gets the implementation and every hyperparameter."""
    noun = kind(lr=0.125, maximize=kind.has_maximize, implementation=implementation)
    optimizer, _ = built(training_with(noun))
    settings: dict[str, Any] = optimizer.defaults
    assert type(optimizer).__name__ == kind.__name__
    assert settings.get("foreach", False) is (implementation is Implementation.FOREACH)
    assert settings.get("fused", False) is (implementation is Implementation.FUSED)
    left_out = {Rprop: {"implementation", "weight_decay"}, Muon: {"implementation", "maximize"}}.get(kind, {"implementation"})
    for name in {field.name for field in fields(noun)} - left_out:
        value = getattr(noun, name)
        assert settings[name] == (value.value if isinstance(value, PrintableEnum) else value), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("zero_grad", ZeroGrad)
def test_implementations_leave_equal_state(kind: type[Optimizer], maximize: bool, zero_grad: ZeroGrad) -> None:
    """Torch accepts every implementation with groups and maximize, and all have the same state tensors and dtypes."""
    states = set()
    for implementation in kind.implementations():
        noun = kind(maximize=maximize and kind.has_maximize, implementation=implementation)
        state = train(single_device_setup(training_with(noun, groups=(VECTORS,), steps=2, zero_grad=zero_grad))).state
        states.add((state.pieces, state.dtypes, state.present, state.fits))
    assert len(states) == 1


def factor(schedule: Schedule, step: int) -> float:
    """Closed form of the schedule's factor."""
    match schedule:
        case StepLR():
            return schedule.gamma ** (step // schedule.step_size)
        case ExponentialLR():
            return schedule.gamma**step
        case LinearLR():
            done = min(step / schedule.total_iters, 1.0)
            return schedule.start_factor * (1.0 - done) + done
        case CosineAnnealingLR():
            return (1.0 + math.cos(math.pi * step / schedule.T_max)) / 2.0
    raise AssertionError(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        StepLR(),
        StepLR(step_size=3, gamma=2.0),
        ExponentialLR(gamma=0.9),
        LinearLR(),
        LinearLR(start_factor=0.5, total_iters=1),
        CosineAnnealingLR(T_max=1),
        CosineAnnealingLR(),
    ],
)
def test_schedule_is_its_closed_form(schedule: Schedule) -> None:
    """At every step, every group has its own rate times the schedule's factor."""
    optimizer, _ = built(replace(TRAINING, optimizer=Adam(lr=0.1), groups=(VECTORS,)))
    scheduler = build_schedule(schedule, optimizer)
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    for step in STEPS:
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.1 * factor(schedule, step), 0.2 * factor(schedule, step)], abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_no_schedule_is_a_constant_rate() -> None:
    """Without a schedule nothing is built."""
    assert build_schedule(None, built(TRAINING)[0]) is None
