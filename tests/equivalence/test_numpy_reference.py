"""The torch reference against an independent forward, backward and optimizer in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from equivcheck.errors import UsageError
from equivcheck.scenario import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    ClipNorm,
    CrossEntropy,
    Data,
    Layer,
    Loss,
    Model,
    Muon,
    Norm,
    NormType,
    Optimizer,
    Precision,
    RMSprop,
    StepLR,
    Training,
)
from equivcheck.strategies import optimizers, trainings
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material
from equivcheck.training.threads import one_thread
from equivcheck.worlds.trace.trace import Snapshot, Step
from numpy_reference.reference import NumpyBatch, NumpyStep, NumpyTrace, numpy_train

Tensors = dict[str, npt.NDArray[np.floating] | None]
Moments = dict[str, Tensors]
"""By what they are, the tensors of one step that are compared."""

RELATIVE = 1e-10
"""Accepted error over the largest norm of its kind in the step; rounding leaves some 1e-15."""
ABSOLUTE = 1e-13
"""Accepted besides: where tanh or sigmoid saturates, torch computes a slope near 0 as a difference of numbers near 1."""
MARGIN = 50.0
"""Accepted error over what rounding may do to a training that is compared."""
SMALLEST_EPS = 1e-6
"""Adam's smallest epsilon here, so that it does not magnify `ABSOLUTE` beyond the tolerance."""
NUM_PERTURBED = 3
"""Runs from material moved by one unit in the last place, by which it is measured what rounding does."""
EXAMPLES = max(100, settings().max_examples)

PLAIN = Training(model=Model(features=3, layers=(Layer(width=4), Layer(width=2))), data=Data(microbatches=(2, 3)))
LABELS = CrossEntropy(class_weights=True, label_smoothing=0.1)
MATRICES = replace(PLAIN, model=Model(features=3, layers=(Layer(width=4, bias=False), Layer(width=2, bias=False))))


def with_large_eps(optimizer: Optimizer) -> Optimizer:
    """An optimizer that does not magnify rounding much."""
    if isinstance(optimizer, Adafactor):
        return replace(optimizer, eps=(max(optimizer.eps[0] or 0.0, SMALLEST_EPS), optimizer.eps[1]))
    return replace(optimizer, eps=max(optimizer.eps, SMALLEST_EPS)) if isinstance(optimizer, Adam) else optimizer


OPTIMIZERS = optimizers(kinds=st.sampled_from((SGD, Adam, AdamW, Adafactor))).map(with_large_eps)
MLPS: dict[str, Any] = {"tokens": st.just(False), "precisions": st.just(Precision.FLOAT64)}
"""Models over sequences have a reference of their own, for one step: `tests/unit/training/test_tokens.py`."""
FLOAT64_TRAININGS = trainings(optimizers=OPTIMIZERS, **MLPS)
MUON_TRAININGS = trainings(optimizers=optimizers(kinds=st.just(Muon)), **MLPS)


def numpy_trace(training: Training, generator: np.random.Generator | None = None) -> NumpyTrace:
    """What NumPy computes from torch's material, or from the same moved by up to one unit in the last place."""
    eps = np.finfo(np.float64).eps

    def moved(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        return values if generator is None else values * (1.0 + eps * generator.uniform(-1.0, 1.0, values.shape))

    drawn, has_labels = material(training), isinstance(training.loss, CrossEntropy)
    parameters = {name: moved(values.numpy()) for name, values in drawn.parameters.items()}
    steps = [
        [
            NumpyBatch(
                inputs=moved(batch.inputs.numpy()),
                targets=batch.targets.numpy() if has_labels else moved(batch.targets.numpy()),
                counted=batch.divisor,
                masks=tuple(None if mask is None else mask.numpy() for mask in batch.masks),
            )
            for batch in microbatches
        ]
        for microbatches in drawn.steps
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        return numpy_train(training, parameters, steps)


def torch_moments(step: Step) -> Moments:
    """What is compared of a step of torch's."""
    found: Moments = {"loss": {"": np.array(step.loss)}, "gradients": tensors(step.gradients)}
    found["parameters"] = tensors(step.parameters)
    if step.clip_norm is not None:
        found["clip norm"] = {"": np.array(step.clip_norm)}
    if step.clipped is not None:
        found["clipped gradients"] = tensors(step.clipped)
    return found


def numpy_moments(step: NumpyStep) -> Moments:
    """What is compared of a step of NumPy's."""
    found: Moments = {"loss": {"": np.array(step.loss)}, "gradients": dict(step.gradients), "parameters": dict(step.parameters)}
    if step.clip_norm is not None:
        found["clip norm"] = {"": np.array(step.clip_norm)}
    if step.clipped is not None:
        found["clipped gradients"] = dict(step.clipped)
    return found


def tensors(snapshot: Snapshot) -> Tensors:
    """The tensors of a single-device snapshot by name; None where absent."""
    assert all(fits or not there for fits, there in zip(snapshot.fits, snapshot.present, strict=True))
    found: Tensors = {}
    offset = 0
    for piece, there in zip(snapshot.pieces, snapshot.present, strict=True):
        found[piece.name] = snapshot.values[offset : offset + piece.numel].reshape(piece.shape) if there else None
        offset += piece.numel if there else 0
    assert offset == snapshot.values.size
    return found


def present(found: Tensors) -> dict[str, bool]:
    """Which names have a tensor."""
    return {name: values is not None for name, values in found.items()}


def largest_error(found: Tensors, expected: Tensors) -> float:
    """The largest norm of an error, in units of tolerance; NaN if anything is not finite."""
    pairs = [(found[name], values) for name, values in expected.items() if values is not None]
    scale = np.max([np.linalg.norm(values) for _, values in pairs])
    errors = [np.linalg.norm(np.subtract(found_values, values)) for found_values, values in pairs]
    return float(np.max(errors) / (RELATIVE * scale + ABSOLUTE))


def is_well_conditioned(training: Training, expected: NumpyTrace) -> bool:
    """Whether rounding alone moves nothing by more than a small part of the tolerance; asks NumPy only, as torch is on trial."""
    generator = np.random.default_rng(training.seed)
    for _ in range(NUM_PERTURBED):
        for step, moved in zip(expected.steps, numpy_trace(training, generator).steps, strict=True):
            centre, other = numpy_moments(step), numpy_moments(moved)
            with np.errstate(over="ignore", invalid="ignore"):
                if not all(largest_error(other[what], centre[what]) <= 1.0 / MARGIN for what in centre):
                    return False
    return True


def assert_agree(found: Moments, expected: Moments, where: str) -> None:
    """Same names, None at the same names, same shapes, and values within tolerance."""
    assert set(found) == set(expected), where
    for what in expected:
        assert present(found[what]) == present(expected[what]), f"{where} {what}"
        assert {name: np.shape(values) for name, values in found[what].items()} == {
            name: np.shape(values) for name, values in expected[what].items()
        }, f"{where} {what}"
        assert largest_error(found[what], expected[what]) <= 1.0, f"{where} {what}"


def assert_references_agree(training: Training, expected: NumpyTrace) -> None:
    """What torch computes is what NumPy computed."""
    with one_thread():
        found = train(single_device_setup(training))
    for index, (torch_step, numpy_step) in enumerate(zip(found.steps, expected.steps, strict=True)):
        assert_agree(torch_moments(torch_step), numpy_moments(numpy_step), f"step {index}")


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FLOAT64_TRAININGS)
def test_numpy_and_torch_agree(training: Training) -> None:
    """Every loss, gradient, clip norm and parameter of every step is the same in both references."""
    expected = numpy_trace(training)
    assume(is_well_conditioned(training, expected))
    assert_references_agree(training, expected)


@settings(max_examples=EXAMPLES // 4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MUON_TRAININGS)
def test_numpy_and_torch_agree_about_muon(training: Training) -> None:
    """Without its rounding to bfloat16, torch's iteration over matrices gives what a polynomial of singular values gives."""
    expected = numpy_trace(training)
    assume(is_well_conditioned(training, expected))
    with _WithoutBfloat16():
        assert_references_agree(training, expected)


class _WithoutBfloat16(TorchFunctionMode):
    """Where a tensor is cast to bfloat16, which versions of torch write in two ways, it is copied instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = func is torch.Tensor.bfloat16 or (kwargs or {}).get("dtype") is torch.bfloat16
        return args[0].clone() if casts else func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("training", "wrong"),
    [
        (PLAIN, replace(PLAIN, loss=Loss.MSE_SUM)),
        (PLAIN, replace(PLAIN, optimizer=SGD(lr=0.05 * (1.0 + 1e-7)))),
        (replace(PLAIN, loss=LABELS), replace(PLAIN, loss=replace(LABELS, z_loss=0.1))),
        (replace(PLAIN, loss=LABELS), replace(PLAIN, loss=replace(LABELS, summed=True))),
        (replace(PLAIN, steps=2), replace(PLAIN, steps=2, schedule=StepLR())),
        (replace(PLAIN, clipping=ClipNorm()), replace(PLAIN, clipping=ClipNorm(norm_type=NormType.INF))),
        (replace(PLAIN, optimizer=Adam(eps=1e-3)), replace(PLAIN, optimizer=Adam(eps=1.01e-3))),
        (replace(PLAIN, optimizer=Adafactor(), steps=2), replace(PLAIN, optimizer=Adafactor(beta2_decay=-0.81), steps=2)),
        # At so small a rate what torch rounds to bfloat16 is within tolerance, and an iteration less is not.
        (replace(MATRICES, optimizer=Muon(lr=1e-9)), replace(MATRICES, optimizer=Muon(lr=1e-9, ns_steps=4))),
    ],
)
def test_what_differs_is_noticed(training: Training, wrong: Training) -> None:
    """The comparison fails when torch trains something else from the same material."""
    with pytest.raises(AssertionError, match="step"):
        assert_references_agree(wrong, numpy_trace(training))


def test_zero_is_not_none() -> None:
    """A gradient of zeros where there should be none is noticed."""
    with pytest.raises(AssertionError, match="step 0 gradients"):
        assert_agree({"gradients": {"weight": np.zeros(2)}}, {"gradients": {"weight": None}}, "step 0")


@pytest.mark.parametrize(("optimizer", "conditioned"), [(SGD(), True), (Adam(eps=1e-30), False), (SGD(lr=1e80), False)])
def test_noise_and_overflow_are_left_out(optimizer: Optimizer, conditioned: bool) -> None:
    """The weight before the normalisation of a single feature has a gradient of rounding only, which Adam divides by itself."""
    layers = (Layer(width=1), Layer(width=3, norm=Norm.LAYER), Layer(width=1), Layer(width=2, norm=Norm.RMS))
    training = Training(model=Model(features=3, layers=layers), data=Data(microbatches=(8,)), optimizer=optimizer, steps=5)
    assert is_well_conditioned(training, numpy_trace(training)) is conditioned


def test_other_optimizers_are_refused() -> None:
    """An optimizer without a NumPy twin is refused with a list of those that have one."""
    with pytest.raises(
        UsageError, match="optimizer RMSprop has no NumPy reference; available: SGD, Adam, AdamW, Adafactor, Muon"
    ):
        numpy_trace(replace(PLAIN, optimizer=RMSprop()))
