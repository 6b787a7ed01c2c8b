"""The torch reference against an independent forward, backward and optimizer in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from equivcheck.errors import UsageError
from equivcheck.oracle.numpy_reference import NumpyBatch, NumpyStep, NumpyTrace, numpy_train
from equivcheck.oracle.reference import reference
from equivcheck.oracle.verdict import Phase
from equivcheck.scenario import SGD, Adam, AdamW, Data, Layer, Model, Optimizer, Precision, RMSprop, Training
from equivcheck.strategies import optimizers, trainings
from equivcheck.train.loop import train
from equivcheck.train.material import Material, material
from equivcheck.train.setup import single_device
from equivcheck.train.trace import Snapshot, Step

Array = npt.NDArray[np.floating]
Tensors = dict[str, Array | None]

RELATIVE = 1e-10
"""Accepted error over the largest norm of its kind in the step; rounding leaves some 1e-15."""
ABSOLUTE = 1e-13
"""Accepted besides: where tanh or sigmoid saturates, torch computes a slope near 0 as a difference of numbers near 1."""
CONDITIONED = RELATIVE / 20
"""Largest measured noise, on the same scale, of a training that is compared: Adam may divide noise by noise."""
SMALLEST_EPS = 1e-6
"""Adam's smallest epsilon here, so that it does not magnify `ABSOLUTE` beyond the tolerance."""
EXAMPLES = max(200, settings().max_examples)

PLAIN = Training(model=Model(features=3, layers=(Layer(width=4), Layer(width=2))), data=Data(microbatches=(2, 3)))


def with_large_eps(optimizer: Optimizer) -> Optimizer:
    """An optimizer that does not magnify rounding much."""
    return replace(optimizer, eps=max(optimizer.eps, SMALLEST_EPS)) if isinstance(optimizer, Adam) else optimizer


OPTIMIZERS = optimizers(kinds=st.sampled_from((SGD, Adam, AdamW))).map(with_large_eps)
FLOAT64_TRAININGS = trainings(optimizers=OPTIMIZERS, precisions=st.just(Precision.FLOAT64))


def is_well_conditioned(training: Training) -> bool:
    """Whether rounding alone moves no tensor of the training by more than a small part of the tolerance."""
    found = reference(training)
    compared = [moment for moment in found.moments if moment.phase not in (Phase.STATE, Phase.BUFFER)]
    return not found.doubt and all((moment.tolerances <= CONDITIONED * moment.scales).all() for moment in compared)


def numpy_trace(training: Training, drawn: Material) -> NumpyTrace:
    """What NumPy computes from the material that torch is given."""
    parameters = {name: values.numpy() for name, values in drawn.parameters.items()}
    steps = [
        [
            NumpyBatch(
                inputs=batch.inputs.numpy(),
                targets=batch.targets.numpy(),
                masks=tuple(None if mask is None else mask.numpy() for mask in batch.masks),
            )
            for batch in microbatches
        ]
        for microbatches in drawn.steps
    ]
    return numpy_train(training, parameters, steps)


def tensors(snapshot: Snapshot) -> Tensors:
    """The tensors of a single-device snapshot by name; None where absent."""
    assert all(fits or not there for fits, there in zip(snapshot.fits, snapshot.present, strict=True))
    found: Tensors = {}
    offset = 0
    for piece, there in zip(snapshot.pieces, snapshot.present, strict=True):
        found[piece.name] = snapshot.values[offset : offset + piece.numel].reshape(piece.shape) if there else None
        offset += piece.numel if there else 0
    return found


def moments(torch_step: Step, numpy_step: NumpyStep) -> Iterator[tuple[str, Tensors, Tensors]]:
    """What is compared of a step: its name, torch's tensors and NumPy's."""
    yield "loss", {"": np.array(torch_step.loss)}, {"": np.array(numpy_step.loss)}
    yield "gradients", tensors(torch_step.gradients), numpy_step.gradients
    assert (torch_step.clip_norm is None) == (numpy_step.clip_norm is None)
    if torch_step.clip_norm is not None and numpy_step.clip_norm is not None:
        yield "clip norm", {"": np.array(torch_step.clip_norm)}, {"": np.array(numpy_step.clip_norm)}
    assert (torch_step.clipped is None) == (numpy_step.clipped is None)
    if torch_step.clipped is not None and numpy_step.clipped is not None:
        yield "clipped gradients", tensors(torch_step.clipped), numpy_step.clipped
    yield "parameters", tensors(torch_step.parameters), dict(numpy_step.parameters)


def present(found: Tensors) -> dict[str, bool]:
    """Which names have a tensor."""
    return {name: values is not None for name, values in found.items()}


def assert_agree(found: Tensors, expected: Tensors, where: str) -> None:
    """Same names, None at the same names, same shapes, and values within tolerance."""
    assert present(found) == present(expected), where
    scale = max((float(np.linalg.norm(values)) for values in expected.values() if values is not None), default=0.0)
    for name, values in expected.items():
        other = found[name]
        if values is None or other is None:
            continue
        assert other.shape == values.shape, f"{where} {name}"
        error = float(np.linalg.norm(other - values))
        assert error <= RELATIVE * scale + ABSOLUTE, f"{where} {name}: error {error:.3g}, largest norm {scale:.3g}"


def assert_references_agree(training: Training, drawn: Material) -> None:
    """Torch from the training's material and NumPy from the material given compute the same."""
    found, expected = train(single_device(training)), numpy_trace(training, drawn)
    assert len(found.steps) == len(expected.steps) == training.steps
    for index, (torch_step, numpy_step) in enumerate(zip(found.steps, expected.steps, strict=True)):
        for what, torch_tensors, numpy_tensors in moments(torch_step, numpy_step):
            assert_agree(torch_tensors, numpy_tensors, f"step {index} {what}")


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FLOAT64_TRAININGS)
def test_numpy_and_torch_agree(training: Training) -> None:
    """Every loss, gradient, clip norm and parameter of every step is the same in both references."""
    assume(is_well_conditioned(training))
    assert_references_agree(training, material(training))


@pytest.mark.parametrize("changed", ["layers.0.linear.weight", "layers.1.linear.bias"])
def test_another_initial_parameter_is_noticed(changed: str) -> None:
    """The comparison fails when NumPy starts from a parameter that is off by a hundred-millionth."""
    drawn = material(PLAIN)
    moved = replace(drawn, parameters=drawn.parameters | {changed: drawn.parameters[changed] * (1.0 + 1e-8)})
    with pytest.raises(AssertionError, match="step 0 loss"):
        assert_references_agree(PLAIN, moved)


def test_a_gradient_that_should_be_none_is_noticed() -> None:
    """Zero is not None."""
    with pytest.raises(AssertionError, match="step 0"):
        assert_agree({"weight": np.zeros(2)}, {"weight": None}, "step 0")


def test_other_optimizers_are_refused() -> None:
    """An optimizer without a NumPy twin is refused with a list of those that have one."""
    with pytest.raises(UsageError, match="optimizer RMSprop has no NumPy reference; available: SGD, Adam, AdamW"):
        numpy_trace(replace(PLAIN, optimizer=RMSprop()), material(PLAIN))
