"""Tests for training several copies in one pass."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from equivcheck.scenario import (
    Activation,
    Adam,
    AuxiliaryLinear,
    ClipNorm,
    ClipValue,
    Data,
    Layer,
    Model,
    NormType,
    Optimizer,
    Precision,
    Training,
    ZeroGrad,
)
from equivcheck.scenario.clipping import Clipping
from equivcheck.scenario.optimizer import OPTIMIZERS
from equivcheck.strategies import optimizers, trainings
from equivcheck.training.accumulate import accumulate
from equivcheck.training.ensemble import EnsembleStep, EnsembleTrace, train_ensemble
from equivcheck.training.loop import train
from equivcheck.training.material import Batch, Material, material
from equivcheck.training.model import build_model
from equivcheck.training.setup import Setup
from equivcheck.training.threads import one_thread
from equivcheck.worlds.trace.trace import Step, Trace

ELEMENTWISE = [kind for kind in OPTIMIZERS if kind.elementwise]
COPIES = 3
RELATIVE = {Precision.FLOAT64: 1e-10, Precision.FLOAT32: 1e-4}
"""Accepted error relative to the norm of all compared values, because batched matmuls sum in another order."""
ABSOLUTE = {Precision.FLOAT64: 1e-13, Precision.FLOAT32: 1e-6}
"""Accepted absolute error. Near saturation torch computes the slope of tanh and sigmoid as a difference of numbers near 1."""
MARGIN = 50.0
"""Accepted error relative to the rounding error of a generated training."""
UNSTABLE = 1e-13
"""Change of each number that must not show. 1e-15 may leave all copies alike although another order of sums does not."""

PLAIN = Training(
    model=Model(
        features=3, layers=(Layer(width=4, activation=Activation.GELU, auxiliary=AuxiliaryLinear.EVEN_STEPS), Layer(width=2))
    ),
    data=Data(microbatches=(3, 1)),
    steps=3,
)


def perturbed(training: Training, amount: float) -> list[Material]:
    """Copies with every number multiplied by up to 1 +- amount, and equal masks."""
    generator = torch.Generator().manual_seed(training.seed)

    def move(values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return values
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
    """Train the copies in one pass."""
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
    """Train one copy with the train loop."""
    model = build_model(training.model, copy.parameters, training.data.batch_dim)
    with patch("equivcheck.training.loop.material", return_value=copy):
        return train(Setup(training=training, model=model, parts=[model], compute=accumulate))


def error_of(found: npt.ArrayLike, expected: npt.ArrayLike, precision: Precision) -> float:
    """Norm of the error in units of tolerance; NaN if a value is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        error, scale = np.linalg.norm(np.subtract(found, expected)), np.linalg.norm(expected)
    return float(error / (RELATIVE[precision] * scale + ABSOLUTE[precision]))


def assert_close(found: npt.ArrayLike, expected: npt.ArrayLike, precision: Precision, where: str) -> None:
    """Assert equality up to rounding, by norm."""
    assert np.shape(found) == np.shape(expected), where
    assert error_of(found, expected, precision) <= 1.0, where


def numbers(trace: Trace) -> list[npt.ArrayLike]:
    """All numbers in a trace."""
    found: list[npt.ArrayLike] = [trace.state.values]
    for step in trace.steps:
        found += [step.loss, step.gradients.values, step.parameters.values]
        found += [] if step.clip_norm is None else [step.clip_norm]
        found += [] if step.clipped is None else [step.clipped.values]
    return found


def are_alike(traces: list[Trace], precision: Precision) -> bool:
    """Whether traces differ by less than a small part of the tolerance."""
    first, *others = (numbers(trace) for trace in traces)
    return all(error_of(*pair, precision) <= 1.0 / MARGIN for other in others for pair in zip(other, first, strict=True))


def assert_each_copy_trains_alone(training: Training, amount: float = 1e-3) -> None:
    """Assert that every copy equals a separate run."""
    copies = perturbed(training, amount)
    assert_rows_are(together(training, copies), [alone(training, copy) for copy in copies], training)


def assert_rows_are(ensemble: EnsembleTrace, traces: list[Trace], training: Training) -> None:
    """Assert that each row of an ensemble is a trace."""
    for row, trace in enumerate(traces):
        for index, (step, expected) in enumerate(zip(ensemble.steps, trace.steps, strict=True)):
            assert_steps_agree(step, row, expected, training.precision, f"copy {row} step {index}")
        assert ensemble.state_names == tuple(piece.name for piece in trace.state.pieces)
        assert_close(ensemble.state[row], trace.state.values, training.precision, f"copy {row} state")


def assert_steps_agree(step: EnsembleStep, row: int, expected: Step, precision: Precision, where: str) -> None:
    """Assert that a row of an ensemble's step equals the step of a single run."""
    assert step.present == expected.gradients.present
    assert_close(step.loss[row], expected.loss, precision, f"{where} loss")
    assert_close(step.gradients[row], expected.gradients.values, precision, f"{where} gradients")
    assert_close(step.parameters[row], expected.parameters.values, precision, f"{where} parameters")
    assert (step.clip_norm is None) == (expected.clip_norm is None)
    if step.clip_norm is not None and expected.clip_norm is not None:
        assert_close(step.clip_norm[row], expected.clip_norm, precision, f"{where} clip norm")
    assert (step.clipped is None) == (expected.clipped is None)
    if step.clipped is not None and expected.clipped is not None:
        assert_close(step.clipped[row], expected.clipped.values, precision, f"{where} clipped gradients")


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("zero_grad", ZeroGrad)
def test_every_optimizer_keeps_copies_apart(kind: type[Optimizer], zero_grad: ZeroGrad) -> None:
    """Different copies train as in separate runs, with every optimizer."""
    assert_each_copy_trains_alone(replace(PLAIN, optimizer=kind(), zero_grad=zero_grad))


@pytest.mark.parametrize(
    "clipping", [*(ClipNorm(max_norm=0.01, norm_type=kind) for kind in NormType), ClipValue(clip_value=0.01)]
)
def test_copies_are_clipped_by_themselves(clipping: Clipping) -> None:
    """Each copy is clipped by its own norm."""
    assert_each_copy_trains_alone(replace(PLAIN, clipping=clipping, optimizer=Adam()), amount=0.5)


@settings(max_examples=max(30, settings().max_examples // 4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trainings(precisions=st.just(Precision.FLOAT64), optimizers=optimizers(kinds=st.sampled_from(ELEMENTWISE))))
def test_generated_trainings_keep_copies_apart(training: Training) -> None:
    """Generated trainings give the same in one pass and one by one, unless rounding is magnified."""
    copies = perturbed(training, UNSTABLE)
    with one_thread():
        traces = [alone(training, copy) for copy in copies]
        assume(are_alike(traces, training.precision))
        assert_rows_are(together(training, copies), traces, training)


def test_float32_copies_are_kept_apart() -> None:
    """Losses, norms and state stay separate in float32 too."""
    assert_each_copy_trains_alone(replace(PLAIN, precision=Precision.FLOAT32, optimizer=Adam(), clipping=ClipNorm()), amount=0.1)


def test_given_parameters_are_not_written_to() -> None:
    """Training copies its initial parameters."""
    copies = perturbed(PLAIN, 1e-3)
    parameters = {name: torch.stack([copy.parameters[name] for copy in copies]) for name in copies[0].parameters}
    before = {name: values.clone() for name, values in parameters.items()}
    inputs, targets = (torch.ones(COPIES, 2, width, dtype=torch.float64) for width in (3, 2))
    train_ensemble(PLAIN, parameters, [[Batch(inputs=inputs, targets=targets, masks=(None, None))]])
    assert all(torch.equal(values, before[name]) for name, values in parameters.items())
