"""Layers that tensor parallelism splits, with a sum over ranks that is missing, done twice or done otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.places import both
from equivcheck.mutants.plan import WITH_A_PLAN, Planned, blocks, has_layer
from equivcheck.scenario import Split, Spread
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    from torch import nn

    from equivcheck.train.model import Block
    from equivcheck.train.setup import Setup


def _is_column(layer: Planned) -> bool:
    return layer.plan.split is Split.COLUMN


def _is_column_after_something(layer: Planned) -> bool:
    """Whether a layer split by columns has anything before it that its input's gradient may be for."""
    return _is_column(layer) and (layer.place.index > 0 or layer.place.layer.norm is not None)


def _is_row(layer: Planned) -> bool:
    return layer.plan.split is Split.ROW


def _is_row_with_bias(layer: Planned) -> bool:
    return _is_row(layer) and layer.place.layer.bias


def _is_norm_of_rows(layer: Planned) -> bool:
    is_normed = layer.place.layer.norm is not None and layer.plan.split is not Split.OUTSIDE
    return is_normed and layer.place.input is Spread.ROWS


def _is_whole_on_rows(layer: Planned) -> bool:
    return layer.plan.split is Split.REPLICATED and layer.place.input is Spread.ROWS


def _linears(block: Block) -> Iterator[nn.Linear]:
    """The linears of a layer: its own, and that at its side."""
    yield block.linear
    if block.side is not None:
        yield block.side


def leave_out_input_sum(setup: Setup) -> None:
    """Send back through a layer split by columns what this rank's columns contribute."""
    _change_input_gradients(setup, again=False)


def repeat_input_sum(setup: Setup) -> None:
    """Sum twice what ranks send back through a layer split by columns."""
    _change_input_gradients(setup, again=True)


def _change_input_gradients(setup: Setup, *, again: bool) -> None:
    from equivcheck.mutants.parameters import changed, summed_again, taken_for_whole

    gradients = summed_again if again else taken_for_whole

    def change(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (changed(inputs[0], gradients=gradients), *inputs[1:])

    for block, _ in blocks(setup, _is_column):
        for linear in _linears(block):
            linear.register_forward_pre_hook(change)


def add_bias_on_every_rank(setup: Setup) -> None:
    """Add the bias of a layer split by rows on each rank, so that the sum has it several times."""

    def add(module: nn.Linear, _inputs: Any, outputs: Any) -> Any:
        return outputs + (outputs.device_mesh.size() - 1) * module.bias.detach()

    for block, _ in blocks(setup, _is_row_with_bias):
        block.linear.register_forward_hook(add, prepend=True)


def average_outputs(setup: Setup) -> None:
    """Average over ranks what a layer split by rows should sum: as if each had so much less of the input."""
    for block, _ in blocks(setup, _is_row):
        for linear in _linears(block):
            linear.register_forward_pre_hook(lambda _module, inputs: (inputs[0] / inputs[0].device_mesh.size(), *inputs[1:]))


def leave_out_output_sum(setup: Setup) -> None:
    """Go on with what this rank's features contribute to the output of a layer split by rows."""
    from equivcheck.mutants.parameters import changed, taken_for_whole

    for block, _ in blocks(setup, _is_row):
        for linear in _linears(block):
            linear.register_forward_hook(lambda _module, _inputs, outputs: changed(outputs, values=taken_for_whole), prepend=True)


def leave_out_norm_sum(setup: Setup) -> None:
    """Leave the gradient of a norm between rows what this rank's rows contribute."""
    from equivcheck.mutants.parameters import unreduced, use_through

    for block, _ in blocks(setup, _is_norm_of_rows):
        assert block.norm is not None, "it was chosen for its norm"
        use_through(block.norm, unreduced)


def leave_out_whole_layer_sum(setup: Setup) -> None:
    """Leave the gradient of a layer that every rank has whole what this rank's rows contribute."""
    from equivcheck.mutants.parameters import unreduced, use_through

    for block, _ in blocks(setup, _is_whole_on_rows):
        for linear in _linears(block):
            use_through(linear, unreduced)


SPLIT_LAYERS: tuple[Mutant, ...] = (
    Mutant(
        name="column_input_gradient_not_reduced",
        wrong="The gradient of the input of a layer split by columns is not summed over ranks.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_column_after_something)),
        plant=leave_out_input_sum,
        causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE),
        minimum=Minimum(because="a norm in the layer itself is before it; over one rank there is nothing to sum"),
    ),
    Mutant(
        name="column_input_gradient_reduced_twice",
        wrong="The gradient of the input of a layer split by columns is summed over ranks twice.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_column_after_something)),
        plant=repeat_input_sum,
        causes=(Cause.INPUT_GRADIENT_SUMMED_TWICE, Cause.SCALED),
        minimum=Minimum(because="a norm in the layer itself is before it; over one rank a second sum changes nothing"),
    ),
    Mutant(
        name="norm_gradient_not_reduced",
        wrong="Under sequence parallelism, the gradient of a norm is not summed over ranks.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_norm_of_rows)),
        plant=leave_out_norm_sum,
        causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART, Cause.RANKS_DISAGREE),
        minimum=Minimum(layers=2, because="it takes a layer before the norm to leave its output by rows"),
    ),
    Mutant(
        name="whole_layer_gradient_not_reduced",
        wrong="Under sequence parallelism, the gradient of a layer that is not split is not summed over ranks.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_whole_on_rows)),
        plant=leave_out_whole_layer_sum,
        causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART, Cause.RANKS_DISAGREE),
        minimum=Minimum(layers=2, because="it takes a layer before it to leave its output by rows"),
    ),
    Mutant(
        name="row_bias_on_every_rank",
        wrong="The bias of a layer split by rows is added on every rank, and so summed.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_row_with_bias)),
        plant=add_bias_on_every_rank,
        causes=(Cause.BIAS_ON_EVERY_RANK,),
        minimum=Minimum(because="one rank adds it once"),
    ),
    Mutant(
        name="row_output_averaged",
        wrong="The output of a layer split by rows is averaged over ranks, not summed.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_row)),
        plant=average_outputs,
        causes=(Cause.OUTPUT_AVERAGED,),
        minimum=Minimum(because="over one rank, mean and sum are the same"),
    ),
    Mutant(
        name="row_output_not_reduced",
        wrong="The output of a layer split by rows is not summed over ranks.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_row)),
        plant=leave_out_output_sum,
        causes=(Cause.PARTIAL_OUTPUT, Cause.RANKS_DISAGREE),
        minimum=Minimum(because="over one rank there is nothing to sum"),
    ),
)
"""Every such mutant."""
