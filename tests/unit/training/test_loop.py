"""Tests for the train loop on one device and its trace."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from equivcheck.scenario import (
    SGD,
    Activation,
    Adam,
    AuxiliaryLinear,
    ClipNorm,
    ClipValue,
    Data,
    ExponentialLR,
    Layer,
    Loss,
    Model,
    NormType,
    Precision,
    Training,
    ZeroGrad,
)
from equivcheck.scenario.clipping import Clipping
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material
from equivcheck.training.model import build_model
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.trace import Snapshot, Trace

MODEL = Model(
    features=3,
    layers=(
        Layer(width=4, activation=Activation.TANH, auxiliary=AuxiliaryLinear.EVEN_STEPS),
        Layer(width=4, frozen=True),
        Layer(width=2, bias=False, auxiliary=AuxiliaryLinear.NEVER),
    ),
    counter=True,
)
TRAINING = Training(model=MODEL, data=Data(microbatches=(3, 1)), optimizer=Adam(), steps=3)
FROZEN = {"layers.1.linear.weight", "layers.1.linear.bias"}
NEVER = {"layers.2.auxiliary.weight"}
EVEN = {"layers.0.auxiliary.weight"}


def run(training: Training) -> Trace:
    """Trace of the single-device run."""
    return train(single_device_setup(training))


def absent(snapshot: Snapshot) -> set[str]:
    """Names of tensors that are None."""
    return {piece.name for piece, there in zip(snapshot.pieces, snapshot.present, strict=True) if not there}


def test_none_gradients_are_reported() -> None:
    """Frozen parameters and idle auxiliary linears have no gradient; all parameters are recorded."""
    steps = run(TRAINING).steps
    assert [absent(step.gradients) for step in steps] == [FROZEN | NEVER, FROZEN | NEVER | EVEN, FROZEN | NEVER]
    assert [absent(step.parameters) for step in steps] == [set()] * 3


def test_gradients_zeroed_to_zero_stay_there() -> None:
    """With `ZeroGrad.ZERO`, a gradient stays zero instead of None."""
    steps = run(replace(TRAINING, zero_grad=ZeroGrad.ZERO)).steps
    assert [absent(step.gradients) for step in steps] == [FROZEN | NEVER] * 3


def test_snapshots_hold_what_their_pieces_say() -> None:
    """A snapshot has one value per element of its pieces.

    Pieces are full tensors, named once, and the same object at every step.
    """
    steps = run(replace(TRAINING, clipping=ClipNorm())).steps
    for step in steps:
        for snapshot in (step.gradients, step.clipped, step.parameters):
            assert snapshot is not None
            assert snapshot.pieces is steps[0].parameters.pieces
            assert all(snapshot.fits[row] for row, there in enumerate(snapshot.present) if there)
            held = sum(piece.numel for piece, there in zip(snapshot.pieces, snapshot.present, strict=True) if there)
            assert snapshot.values.shape == (held,)
    assert [piece.name for piece in steps[0].parameters.pieces] == list(material(TRAINING).parameters)


def test_snapshots_are_copies() -> None:
    """The next step does not overwrite a snapshot, even if there is only one parameter."""
    model = Model(features=1, layers=(Layer(width=1, bias=False),))
    training = Training(model=model, data=Data(microbatches=(1,)), steps=3, zero_grad=ZeroGrad.ZERO)
    steps = run(training).steps
    for kept in ([step.parameters for step in steps], [step.gradients for step in steps]):
        assert len({snapshot.values.item() for snapshot in kept}) == 3
    step = run(replace(training, clipping=ClipValue(clip_value=0.01))).steps[0]
    assert step.clipped is not None
    assert step.gradients.values.item() == steps[0].gradients.values.item() != step.clipped.values.item()


@pytest.mark.parametrize("precision", Precision)
def test_element_types_are_the_precision(precision: Precision) -> None:
    """Gradients, parameters and optimizer averages have the training's dtype."""
    trace = run(replace(TRAINING, precision=precision))
    assert set(trace.steps[0].parameters.dtypes) == {precision.value}
    assert set(trace.steps[0].gradients.dtypes) == {precision.value, ""}
    assert {
        dtype for piece, dtype in zip(trace.state.pieces, trace.state.dtypes, strict=True) if not piece.name.endswith("/step")
    } == {precision.value}


@pytest.mark.parametrize("loss", Loss)
def test_microbatches_make_up_the_batch(loss: Loss) -> None:
    """Uneven microbatches give the same loss and gradients as one batch."""
    training = replace(TRAINING, loss=loss, steps=1)
    (parts,) = material(training).steps
    whole = replace(
        parts[0], inputs=torch.cat([part.inputs for part in parts]), targets=torch.cat([part.targets for part in parts])
    )
    split = run(training).steps[0]
    with patch("equivcheck.training.loop.material", return_value=replace(material(training), steps=((whole,),))):
        joined = run(training).steps[0]
    assert split.loss == pytest.approx(joined.loss, rel=1e-14)
    np.testing.assert_allclose(split.gradients.values, joined.gradients.values, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", Loss)
def test_loss_is_that_of_its_name(loss: Loss) -> None:
    """Losses are squares or differences, summed or averaged over the step's batch."""
    training = replace(TRAINING, loss=loss, steps=1)
    module = build_model(MODEL, material(training).parameters)
    (parts,) = material(training).steps
    errors = torch.cat([module(part.inputs, part.masks, 0) - part.targets for part in parts])
    values = errors if loss in (Loss.LINEAR_MEAN, Loss.LINEAR_SUM) else errors.square()
    expected = values.mean() if loss in (Loss.MSE_MEAN, Loss.LINEAR_MEAN) else values.sum()
    assert run(training).steps[0].loss == pytest.approx(expected.item(), rel=1e-13)


@pytest.mark.parametrize("norm_type", NormType)
def test_clipping_by_norm(norm_type: NormType) -> None:
    """The recorded norm is the total norm before clipping; afterwards it is the maximum."""
    step = run(replace(TRAINING, clipping=ClipNorm(max_norm=0.01, norm_type=norm_type))).steps[0]
    order = float(norm_type.value)
    assert step.clipped is not None
    assert step.clip_norm == pytest.approx(np.linalg.norm(step.gradients.values, order), rel=1e-12)
    assert np.linalg.norm(step.clipped.values, order) == pytest.approx(0.01, rel=1e-3)


def test_clipping_by_value() -> None:
    """Every element is clamped and no norm is recorded."""
    step = run(replace(TRAINING, clipping=ClipValue(clip_value=0.01))).steps[0]
    assert step.clip_norm is None
    assert step.clipped is not None
    np.testing.assert_array_equal(step.clipped.values, step.gradients.values.clip(-0.01, 0.01))


@pytest.mark.parametrize(("clipping", "clipped"), [(None, False), (ClipNorm(), True), (ClipValue(), True)])
def test_clipped_gradients_are_there_only_with_clipping(clipping: Clipping | None, clipped: bool) -> None:
    """Without clipping neither norm nor clipped gradients are recorded."""
    step = run(replace(TRAINING, clipping=clipping)).steps[0]
    assert (step.clipped is not None) is clipped
    assert (step.clip_norm is not None) is isinstance(clipping, ClipNorm)


def test_update_uses_clipped_gradients_and_the_schedule() -> None:
    """Plain SGD moves parameters by the scheduled rate times the clipped gradient."""
    model = Model(features=3, layers=(Layer(width=2),))
    training = Training(
        model=model, data=Data(microbatches=(4,)), optimizer=SGD(lr=0.5), steps=3, clipping=ClipNorm(), schedule=ExponentialLR()
    )
    before = np.concatenate([values.numpy().ravel() for values in material(training).parameters.values()])
    for index, step in enumerate(run(training).steps):
        assert step.clipped is not None
        np.testing.assert_allclose(step.parameters.values, before - 0.5 * 0.5**index * step.clipped.values, rtol=1e-13)
        before = step.parameters.values


def test_state_is_that_of_trained_parameters() -> None:
    """Parameters that never had a gradient have no state; Adam's scalars have no dims."""
    state = run(TRAINING).state
    trained = [name for name in material(TRAINING).parameters if name not in FROZEN | NEVER]
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert [piece.name for piece in state.pieces] == [f"{name}/{key}" for name in trained for key in keys]
    steps = [piece for piece in state.pieces if piece.name.endswith("/step")]
    assert {piece.shape for piece in steps} == {()}
    assert {piece.shape for piece in state.pieces if piece.name.startswith("layers.0.linear.weight/exp")} == {(4, 3)}


def test_state_values_are_the_last_ones() -> None:
    """A step count equals the parameter's updates: every step, or every other step for the auxiliary linear."""
    state = run(TRAINING).state
    counts, offset = {}, 0
    for piece in state.pieces:
        if piece.name.endswith("/step"):
            counts[piece.name] = state.values[offset]
        offset += piece.numel
    assert offset == len(state.values)
    assert {name for name, count in counts.items() if count == 2} == {"layers.0.auxiliary.weight/step"}
    assert set(counts.values()) == {2.0, 3.0}


def test_sgd_without_momentum_has_no_state() -> None:
    """The state snapshot is empty."""
    state = run(replace(TRAINING, optimizer=SGD())).state
    assert state.pieces == ()
    assert state.values.size == 0


def test_buffers_are_read_at_the_end() -> None:
    """The counter has counted every microbatch in every step."""
    buffers = run(TRAINING).buffers
    assert [piece.name for piece in buffers.pieces] == ["forwards"]
    assert buffers.dtypes == ("int64",)
    assert buffers.values.tolist() == [6]


def test_training_repeats_bit_for_bit() -> None:
    """Two runs give identical bits."""
    first, second = run(TRAINING), run(TRAINING)
    assert [step.loss for step in first.steps] == [step.loss for step in second.steps]
    np.testing.assert_array_equal(first.steps[-1].parameters.values, second.steps[-1].parameters.values)


def test_hooks_are_called_around_backward() -> None:
    """Hooks get each step's index: `before_step` before zeroing, `before_update` with gradients present."""
    setup: Setup = single_device_setup(TRAINING)
    parameter = setup.model.get_parameter("layers.0.linear.weight")
    seen: list[tuple[str, int, bool]] = []
    setup.before_step.append(lambda optimizer, index: seen.append(("step", index, parameter.grad is None)))
    setup.before_update.append(lambda optimizer, index: seen.append(("update", index, parameter.grad is None)))
    train(setup)
    assert seen == [(when, index, (when, index) == ("step", 0)) for index in range(3) for when in ("step", "update")]


def test_accumulation_is_told_the_last_microbatch() -> None:
    """The context around backward knows whether the microbatch is the step's last."""
    setup = single_device_setup(replace(TRAINING, data=Data(microbatches=(1, 2, 1)), steps=1))
    told: list[bool] = []
    plain = setup.accumulation
    setup.accumulation = lambda last: (told.append(last), plain(last))[1]
    train(setup)
    assert told == [False, False, True]
