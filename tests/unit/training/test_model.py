"""Tests for the model's module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from equivcheck.scenario import Activation, AuxiliaryLinear, Data, Layer, Model, Norm, ShapeOp, Training
from equivcheck.training.layers.linear.shape_ops import added_constant
from equivcheck.training.material import material
from equivcheck.training.model import MLP, build_model

MODEL = Model(
    features=3,
    layers=(
        Layer(width=3, norm=Norm.LAYER, auxiliary=AuxiliaryLinear.EVEN_STEPS),
        Layer(width=4, norm=Norm.RMS, bias=False, frozen=True),
        Layer(width=3, residual=False, auxiliary=AuxiliaryLinear.NEVER),
        Layer(width=3, shares=0, frozen=True),
    ),
    counter=True,
)
SHAPES = {
    "layers.0.norm.weight": (3,),
    "layers.0.norm.bias": (3,),
    "layers.0.linear.weight": (3, 3),
    "layers.0.linear.bias": (3,),
    "layers.0.auxiliary.weight": (3, 3),
    "layers.1.norm.weight": (3,),
    "layers.1.linear.weight": (4, 3),
    "layers.2.linear.weight": (3, 4),
    "layers.2.linear.bias": (3,),
    "layers.2.auxiliary.weight": (3, 4),
    "layers.3.linear.bias": (3,),
}
NO_MASKS = (None,) * 4
INPUTS = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).reshape(2, 3)


def built(model: Model) -> MLP:
    """Module with its initial parameters."""
    return build_model(model, material(Training(model=model, data=Data(microbatches=(2,)))).parameters)


@pytest.fixture
def module() -> MLP:
    """Module of `MODEL`."""
    return built(MODEL)


def test_names_and_shapes(module: MLP) -> None:
    """Parameters have canonical names and shapes in the order drawn; a shared weight has those of its owner."""
    assert [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()] == list(SHAPES.items())


def test_shared_weight_is_one_parameter(module: MLP) -> None:
    """A layer that shares a weight has the same parameter object."""
    assert module.get_submodule("layers.3.linear").weight is module.get_submodule("layers.0.linear").weight


def test_frozen_layers_require_no_gradient(module: MLP) -> None:
    """Parameters that a frozen layer owns require no gradient; a weight that it only shares does."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {"layers.1.norm.weight", "layers.1.linear.weight", "layers.3.linear.bias"}


def test_initial_parameters_are_copied() -> None:
    """Training a module does not change the cached initial parameters."""
    drawn = material(Training(model=MODEL, data=Data(microbatches=(2,))))
    module = build_model(MODEL, drawn.parameters)
    before = drawn.parameters["layers.0.linear.weight"].clone()
    with torch.no_grad():
        module.get_parameter("layers.0.linear.weight").zero_()
    assert torch.equal(drawn.parameters["layers.0.linear.weight"], before)


def test_building_draws_no_random_numbers() -> None:
    """Torch's default generator is unchanged, because ranks may be threads."""
    before = torch.get_rng_state()
    built(MODEL)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("step", "runs"), [(0, True), (1, False), (2, True)])
def test_auxiliary_linear_runs_at_even_steps(module: MLP, step: int, runs: bool) -> None:
    """The auxiliary linear runs at steps 0, 2, 4 and has no gradient otherwise; one with NEVER has none at all."""
    module(INPUTS, NO_MASKS, step).sum().backward()
    assert (module.get_parameter("layers.0.auxiliary.weight").grad is not None) is runs
    assert module.get_parameter("layers.2.auxiliary.weight").grad is None


def test_counter_counts_forwards(module: MLP) -> None:
    """The buffer increases by one with every forward."""
    for _ in range(3):
        module(INPUTS, NO_MASKS, 0)
    assert module.forwards.tolist() == 3


def test_offset_is_added_to_the_outputs() -> None:
    """The buffer has one nonzero number per output and is not trained."""
    model = Model(features=3, layers=(Layer(width=4),))
    plain, moved = built(model), built(replace(model, offset=True))
    assert torch.equal(moved(INPUTS, (None,), 0), plain(INPUTS, (None,), 0) + moved.offset)
    assert moved.offset.shape == (4,)
    assert moved.offset.dtype == torch.float64
    assert moved.offset.all()
    assert "offset" not in dict(moved.named_parameters())


def test_a_scale_multiplies_the_outputs_before_the_offset() -> None:
    """The scale is the model's first parameter, has shape [], and is trained even if layers are frozen."""
    model = Model(features=3, layers=(Layer(width=4), Layer(width=4, frozen=True)), offset=True, scale=True)
    scaled, parameters = built(model), material(Training(model=model, data=Data(microbatches=(2,)))).parameters
    plain = build_model(
        replace(model, offset=False, scale=False), {name: parameters[name] for name in parameters if name != "scale"}
    )
    assert torch.equal(scaled(INPUTS, (None,) * 2, 0), plain(INPUTS, (None,) * 2, 0) * parameters["scale"] + scaled.offset)
    name, scale = next(scaled.named_parameters())
    assert (name, scale.shape, scale.requires_grad) == ("scale", (), True)


def test_model_without_counter_has_no_buffers() -> None:
    """Without counter and offset there are no buffers."""
    assert list(built(Model(features=2, layers=(Layer(width=2),))).buffers()) == []


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("activation", "module"),
    [
        (Activation.IDENTITY, nn.Identity()),
        (Activation.RELU, nn.ReLU()),
        (Activation.GELU, nn.GELU()),
        (Activation.TANH, nn.Tanh()),
        (Activation.SIGMOID, nn.Sigmoid()),
        (Activation.SILU, nn.SiLU()),
    ],
)
def test_layer_is_what_its_docstring_says(activation: Activation, module: nn.Module, residual: bool) -> None:
    """Norm, linear plus auxiliary linear, activation, mask, then the residual."""
    layer = Layer(
        width=3, activation=activation, residual=residual, norm=Norm.LAYER, auxiliary=AuxiliaryLinear.EVEN_STEPS, dropout=0.5
    )
    model = built(Model(features=3, layers=(layer,)))
    mask = torch.tensor([[0.0, 2.0, 2.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    block = model.get_submodule("layers.0")
    normed = block.norm(INPUTS)
    expected = module(block.linear(normed) + block.auxiliary(normed)) * mask
    if residual:
        expected = expected + INPUTS
    torch.testing.assert_close(model(INPUTS, (mask,), 0), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape_op", ShapeOp)
@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_shape_op_keeps_its_input_or_adds_to_it(shape_op: ShapeOp, width: int) -> None:
    """It runs last, returns its input plus the result of `added_constant`, and passes gradients unchanged."""
    plain, with_shape_op = (
        built(Model(features=3, layers=(Layer(width=width, shape_op=chosen),))) for chosen in (None, shape_op)
    )
    constant = added_constant(shape_op, width, torch.float64)
    expected, found = (module(INPUTS, (None,), 0) for module in (plain, with_shape_op))
    assert torch.equal(found, expected if constant is None else expected + constant)
    for outputs in (expected, found):
        (outputs * torch.linspace(-1.0, 2.0, 2 * width, dtype=torch.float64).view(2, width)).sum().backward()
    for one, other in zip(plain.parameters(), with_shape_op.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape_op", ShapeOp)
@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_shape_op_takes_no_rows(shape_op: ShapeOp, width: int) -> None:
    """A rank without rows continues, so that it joins the collectives."""
    module = built(Model(features=3, layers=(Layer(width=width, shape_op=shape_op),)))
    assert module(INPUTS[:0], (None,), 0).shape == (0, width)


def test_rows_along_dim_1_are_transposed_in_and_out() -> None:
    """The model maps (features, rows) to (outputs, rows)."""
    parameters = material(Training(model=MODEL, data=Data(microbatches=(2,)))).parameters
    plain, turned = (build_model(MODEL, parameters, batch_dim) for batch_dim in (0, 1))
    assert torch.equal(plain(INPUTS, NO_MASKS, 0).T, turned(INPUTS.T, NO_MASKS, 0))
