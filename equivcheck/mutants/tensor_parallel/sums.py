"""Reductions missing, done twice or averaged in tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import all_of, is_eager
from equivcheck.mutants.parameter_use import (
    TensorFunction,
    change_input_gradient,
    keep_partial_gradient,
    reduce_twice,
    transform,
    treat_as_reduced,
    use_through,
)
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL, Planned, blocks, has_layer
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ActivationSharding, Split
from equivcheck.training.layers.linear.module import Block
from equivcheck.training.setup import Setup


def _is_column(layer: Planned) -> bool:
    return layer.plan.split is Split.COLWISE


def _is_column_after_something(layer: Planned) -> bool:
    """Whether the layer is column-parallel and earlier parameters need its input gradient."""
    return _is_column(layer) and (layer.site.index > 0 or layer.site.layer.norm is not None)


def _is_row(layer: Planned) -> bool:
    return layer.plan.split is Split.ROWWISE


def _is_row_with_bias(layer: Planned) -> bool:
    return _is_row(layer) and layer.site.layer.bias


def _is_norm_of_rows(layer: Planned) -> bool:
    is_normed = layer.site.layer.norm is not None and layer.plan.split is not Split.NOT_IN_PLAN
    return is_normed and layer.site.input is ActivationSharding.ROWS


def _is_whole_on_rows(layer: Planned) -> bool:
    return layer.plan.split is Split.REPLICATED and layer.site.input is ActivationSharding.ROWS


def _linears(block: Block) -> Iterator[nn.Linear]:
    """Yield the layer's linears."""
    yield block.linear
    if block.auxiliary is not None:
        yield block.auxiliary


@fault(
    layouts=TENSOR_PARALLEL,
    applies=all_of(is_eager, has_layer(_is_column_after_something)),
    causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE),
)
def column_input_gradient_not_reduced(setup: Setup) -> None:
    """Bug: the input gradient for a column-parallel layer is not summed over ranks."""
    _change_input_gradients(setup, treat_as_reduced)


@fault(
    layouts=TENSOR_PARALLEL,
    applies=all_of(is_eager, has_layer(_is_column_after_something)),
    causes=(Cause.INPUT_GRADIENT_SUMMED_TWICE, Cause.SCALED),
)
def column_input_gradient_reduced_twice(setup: Setup) -> None:
    """Bug: the input gradient for a column-parallel layer is summed over ranks twice."""
    _change_input_gradients(setup, reduce_twice)


def _change_input_gradients(setup: Setup, gradients: TensorFunction) -> None:
    for block, _ in blocks(setup, _is_column):
        for linear in _linears(block):
            change_input_gradient(linear, gradients)


@fault(
    layouts=TENSOR_PARALLEL,
    applies=all_of(is_eager, has_layer(_is_norm_of_rows)),
    causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART, Cause.RANKS_DISAGREE),
    minimum=Minimum(layers=2, because="the layer before must leave its output sharded by rows"),
)
def norm_gradient_not_reduced(setup: Setup) -> None:
    """Bug: under sequence parallelism, norm gradients are not summed over ranks."""
    for block, _ in blocks(setup, _is_norm_of_rows):
        assert block.norm is not None, "only layers with a norm are selected"
        use_through(block.norm, keep_partial_gradient)


@fault(
    layouts=TENSOR_PARALLEL,
    applies=all_of(is_eager, has_layer(_is_whole_on_rows)),
    causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART, Cause.RANKS_DISAGREE),
    minimum=Minimum(layers=2, because="the layer before must leave its output sharded by rows"),
)
def replicated_layer_gradient_not_reduced(setup: Setup) -> None:
    """Bug: under sequence parallelism, gradients for a replicated layer are not summed over ranks."""
    for block, _ in blocks(setup, _is_whole_on_rows):
        for linear in _linears(block):
            use_through(linear, keep_partial_gradient)


@fault(layouts=TENSOR_PARALLEL, applies=all_of(is_eager, has_layer(_is_row_with_bias)), causes=(Cause.BIAS_ON_EVERY_RANK,))
def row_bias_on_every_rank(setup: Setup) -> None:
    """Bug: each rank adds a row-parallel layer's bias before the sum, so it counts several times."""

    def add(module: nn.Linear, _inputs: Any, outputs: Any) -> Any:
        return outputs + (outputs.device_mesh.size() - 1) * module.bias.detach()

    for block, _ in blocks(setup, _is_row_with_bias):
        block.linear.register_forward_hook(add, prepend=True)


@fault(layouts=TENSOR_PARALLEL, applies=all_of(is_eager, has_layer(_is_row)), causes=(Cause.OUTPUT_AVERAGED,))
def row_output_averaged(setup: Setup) -> None:
    """Bug: the output from a row-parallel layer is averaged over ranks instead of summed."""
    for block, _ in blocks(setup, _is_row):
        for linear in _linears(block):
            linear.register_forward_pre_hook(lambda _module, inputs: (inputs[0] / inputs[0].device_mesh.size(), *inputs[1:]))


@fault(layouts=TENSOR_PARALLEL, applies=all_of(is_eager, has_layer(_is_row)), causes=(Cause.PARTIAL_OUTPUT, Cause.RANKS_DISAGREE))
def row_output_not_reduced(setup: Setup) -> None:
    """Bug: the output from a row-parallel layer is not summed over ranks."""
    for block, _ in blocks(setup, _is_row):
        for linear in _linears(block):
            linear.register_forward_hook(
                lambda _module, _inputs, outputs: transform(outputs, values=treat_as_reduced), prepend=True
            )
