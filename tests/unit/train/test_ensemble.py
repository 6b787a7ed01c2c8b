"""Tests for training several copies at once."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from equivcheck.oracle.reference import reference
from equivcheck.scenario import (
    Activation,
    Adam,
    ClipNorm,
    ClipValue,
    Data,
    Layer,
    Model,
    NormType,
    Optimizer,
    Side,
    Training,
    ZeroGrad,
)
from equivcheck.scenario.clipping import Clipping
from equivcheck.scenario.optimizer import OPTIMIZERS
from equivcheck.strategies import trainings
from equivcheck.train.ensemble import EnsembleTrace, train_ensemble
from equivcheck.train.loop import train
from equivcheck.train.material import Batch, Material, material
from equivcheck.train.model import build_model
from equivcheck.train.setup import Setup
from equivcheck.train.trace import Trace

COPIES = 3
ROUNDINGS = 2000.0
"""Accepted error in units of eps times the largest norm; honest runs were at most some hundred apart, as serial runs are."""

PLAIN = Training(
    model=Model(features=3, layers=(Layer(width=4, activation=Activation.GELU, side=Side.EVEN_STEPS), Layer(width=2))),
    data=Data(microbatches=(3, 1)),
    steps=3,
)


def perturbed(training: Training, amount: float) -> list[Material]:
    """Materials of copies that differ: every number multiplied by up to 1 +- amount, masks alike."""
    generator = torch.Generator().manual_seed(training.seed)

    def move(values: torch.Tensor) -> torch.Tensor:
        return values * (1.0 + amount * (2.0 * torch.rand(values.shape, generator=generator, dtype=values.dtype) - 1.0))

    def move_batch(batch: Batch) -> Batch:
        return replace(batch, inputs=move(batch.inputs), targets=move(batch.targets))

    drawn = material(training)
    return [
        Material(
            parameters={name: move(values) for name, values in drawn.parameters.items()},
            steps=tuple(tuple(move_batch(batch) for batch in step) for step in drawn.steps),
        )
        for _ in range(COPIES)
    ]


def together(training: Training, copies: list[Material]) -> EnsembleTrace:
    """The copies trained at once."""
    parameters = {name: torch.stack([copy.parameters[name] for copy in copies]) for name in copies[0].parameters}
    steps = [
        [
            replace(
                batch,
                inputs=torch.stack([copy.steps[step][number].inputs for copy in copies]),
                targets=torch.stack([copy.steps[step][number].targets for copy in copies]),
            )
            for number, batch in enumerate(microbatches)
        ]
        for step, microbatches in enumerate(copies[0].steps)
    ]
    return train_ensemble(training, parameters, steps)


def alone(training: Training, copy: Material) -> Trace:
    """One copy by the train loop."""
    model = build_model(training.model, copy.parameters)
    with patch("equivcheck.train.loop.material", return_value=copy):
        return train(Setup(training=training, model=model, module=model))


def assert_close(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating], eps: float, where: str) -> None:
    """Equal but for rounding, normwise."""
    assert found.shape == expected.shape, where
    error, scale = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    assert error <= ROUNDINGS * eps * scale, f"{where}: {error:.3g} of {scale:.3g}"


def assert_each_copy_trains_alone(training: Training, amount: float = 1e-3) -> None:
    """Every copy of an ensemble leaves what it leaves by itself."""
    copies = perturbed(training, amount)
    eps = float(np.finfo(training.precision.value).eps)
    ensemble = together(training, copies)
    for row, copy in enumerate(copies):
        trace = alone(training, copy)
        assert len(ensemble.steps) == len(trace.steps)
        for index, (step, expected) in enumerate(zip(ensemble.steps, trace.steps, strict=True)):
            assert step.present == expected.gradients.present
            assert step.loss[row] == pytest.approx(expected.loss, rel=ROUNDINGS * eps, abs=ROUNDINGS * eps)
            assert_close(step.gradients[row], expected.gradients.values, eps, f"copy {row} step {index} gradients")
            assert (step.clip_norm is None) == (expected.clip_norm is None)
            if step.clip_norm is not None:
                assert step.clip_norm[row] == pytest.approx(expected.clip_norm, rel=ROUNDINGS * eps)
            assert (step.clipped is None) == (expected.clipped is None)
            if step.clipped is not None and expected.clipped is not None:
                assert_close(step.clipped[row], expected.clipped.values, eps, f"copy {row} step {index} clipped")
            assert_close(step.parameters[row], expected.parameters.values, eps, f"copy {row} step {index} parameters")
        assert ensemble.state_names == tuple(piece.name for piece in trace.state.pieces)
        assert_close(ensemble.state[row], trace.state.values, eps, f"copy {row} state")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("zero_grad", ZeroGrad)
def test_every_optimizer_keeps_copies_apart(kind: type[Optimizer], zero_grad: ZeroGrad) -> None:
    """Copies that clearly differ each train as they would alone, whatever the optimizer."""
    assert_each_copy_trains_alone(replace(PLAIN, optimizer=kind(), zero_grad=zero_grad))


@pytest.mark.parametrize(
    "clipping", [*(ClipNorm(max_norm=0.01, norm_type=kind) for kind in NormType), ClipValue(clip_value=0.01)]
)
def test_copies_are_clipped_by_themselves(clipping: Clipping) -> None:
    """The norm of a copy is not that of all copies."""
    assert_each_copy_trains_alone(replace(PLAIN, clipping=clipping, optimizer=Adam()), amount=0.5)


@settings(max_examples=max(60, settings().max_examples // 4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trainings())
def test_generated_trainings_keep_copies_apart(training: Training) -> None:
    """Whatever can be trained gives the same at once as one by one, where rounding is not magnified."""
    found = reference(training)
    eps = float(np.finfo(training.precision.value).eps)
    assume(not found.doubt and all((moment.tolerances <= ROUNDINGS / 20 * eps * moment.norms).all() for moment in found.moments))
    assert_each_copy_trains_alone(training, amount=8 * eps)


def test_given_parameters_are_not_written_to() -> None:
    """Training copies its initial parameters."""
    copies = perturbed(PLAIN, 1e-3)
    parameters = {name: torch.stack([copy.parameters[name] for copy in copies]) for name in copies[0].parameters}
    before = {name: values.clone() for name, values in parameters.items()}
    inputs, targets = (torch.ones(COPIES, 2, width, dtype=torch.float64) for width in (3, 2))
    train_ensemble(PLAIN, parameters, [[Batch(inputs=inputs, targets=targets, masks=(None, None))]])
    assert all(torch.equal(values, before[name]) for name, values in parameters.items())
