"""Shards of layers that tensor parallelism splits, in another order or along another dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.places import both
from equivcheck.mutants.plan import WITH_A_PLAN, Planned, blocks, has_layer
from equivcheck.parallelisms.tensor_parallel.plans import LayerSite
from equivcheck.scenario import Scenario, Split, Spread
from equivcheck.scenario.mesh import TP
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    import torch
    from torch import nn

    from equivcheck.train.material import Batch
    from equivcheck.train.setup import Setup


def _is_square(layer: Planned) -> bool:
    """Whether it is split, and what is cut along the wrong dim still fits."""
    width = layer.place.layer.width
    return layer.plan.split in (Split.COLUMN, Split.ROW) and width == layer.place.model.inputs(layer.place.index) > 1


def _has_halves(layer: Planned) -> bool:
    """Whether it is split by columns, and each rank can have as many of the first half as of the second."""
    return layer.plan.split is Split.COLUMN and layer.place.layer.width % (2 * layer.place.tp) == 0


def _is_gathered(layer: Planned) -> bool:
    return layer.plan.split is Split.COLUMN and layer.plan.output is Spread.WHOLE and layer.place.layer.width > 1


def _tells_order(scenario: Scenario) -> bool:
    """Whether such a layer's features are told apart: outputs of the last layer, if they are only added up, are not."""
    adds_up = scenario.training.loss.is_linear
    return has_layer(lambda layer: _is_gathered(layer) and not (adds_up and _ends_alike(layer.place)))(scenario)


def _ends_alike(place: LayerSite) -> bool:
    return place.index == len(place.model.layers) - 1 and not place.layer.dropout


def _gathers_rows(layer: Planned) -> bool:
    return layer.plan.split is Split.COLUMN and layer.place.input is Spread.ROWS


def cut_other_dim(setup: Setup) -> None:
    """Give each rank its part of a square weight along the other dim."""
    _change_weights(setup, _is_square, ("linear.weight", "side.weight"), lambda weight, _layer: weight.T)


def cut_halves_apart(setup: Setup) -> None:
    """Give each rank a part of either half of a weight, as of two fused layers, where it should have one run of rows."""
    _change_weights(setup, _has_halves, ("linear.weight", "linear.bias", "side.weight"), _halves_interleaved)


def _halves_interleaved(whole: torch.Tensor, layer: Planned) -> torch.Tensor:
    return whole.reshape(2, layer.place.tp, -1).transpose(0, 1).reshape(whole.shape)


def _change_weights(
    setup: Setup,
    chosen: Callable[[Planned], bool],
    names: tuple[str, ...],
    change: Callable[[torch.Tensor, Planned], torch.Tensor],
) -> None:
    from equivcheck.mutants.initial_values import overwrite
    from equivcheck.train.material import material

    initial, found = material(setup.training).parameters, {}
    for _, layer in blocks(setup, chosen):
        for name in (f"layers.{layer.place.index}.{name}" for name in names):
            if name in initial:
                found[name] = change(initial[name], layer)
    overwrite(setup, found)


def gather_columns_in_another_order(setup: Setup) -> None:
    """Put the shards of the output of a layer split by columns together with the last one first."""

    def roll(_module: nn.Module, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.roll(-(-outputs.shape[-1] // tp), dims=-1)

    for block, layer in blocks(setup, _is_gathered):
        tp = layer.place.tp
        block.linear.register_forward_hook(roll)


def gather_rows_in_another_order(setup: Setup) -> None:
    """Put rows together with those of the last rank first where a layer split by columns finds its input by rows."""
    from equivcheck.mutants.parameters import changed

    def roll(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (changed(inputs[0], values=lambda x: _rolled(x, 1), gradients=lambda x: _rolled(x, -1)), *inputs[1:])

    for block, _ in blocks(setup, _gathers_rows):
        block.linear.register_forward_pre_hook(roll)


def _rolled(tensor: Any, shards: int) -> torch.Tensor:
    """A DTensor whose local tensor has all rows, with these moved on by so many ranks."""
    from torch.distributed.tensor import DTensor

    local, mesh = tensor.to_local(), tensor.device_mesh
    moved = local.roll(shards * (local.shape[0] // mesh.size()), dims=0)
    return DTensor.from_local(moved, mesh, tensor.placements, run_check=False)


def draw_masks_on_each_rank(setup: Setup) -> None:
    """Let every tensor-parallel rank but the first drop what should be kept."""
    from equivcheck.mutants.masks import other_masks

    assert setup.mesh is not None, "a mutant is planted into a rank"
    if TP not in (setup.mesh.mesh_dim_names or ()) or setup.mesh.get_local_rank(TP) == 0:
        return
    inner, model = setup.take, setup.training.model

    def take(batch: Batch) -> Batch:
        return other_masks(inner(batch), model)

    setup.take = take


def _drops_on_several(scenario: Scenario) -> bool:
    return scenario.layout.mesh.size(TP) > 1 and any(layer.dropout for layer in scenario.training.model.layers)


SHARDS: tuple[Mutant, ...] = (
    Mutant(
        name="sharded_along_wrong_dim",
        wrong="A square weight is cut along the wrong dim.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_is_square)),
        plant=cut_other_dim,
        causes=(Cause.PERMUTED,),
        minimum=Minimum(because="one rank has all of it"),
    ),
    Mutant(
        name="fused_weight_cut_in_halves",
        wrong="A weight split by columns is cut as if it were two fused ones: each rank has a part of either half.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_has_halves)),
        plant=cut_halves_apart,
        causes=(Cause.PERMUTED,),
        minimum=Minimum(because="one rank has both halves"),
    ),
    Mutant(
        name="columns_gathered_in_another_order",
        wrong="The shards of the output of a layer split by columns are put together in another order.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, _tells_order),
        plant=gather_columns_in_another_order,
        causes=(Cause.PERMUTED,),
        minimum=Minimum(because="one shard has no order"),
    ),
    Mutant(
        name="rows_gathered_in_another_order",
        wrong="Under sequence parallelism, the rows of all ranks are put together in another order.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, has_layer(_gathers_rows)),
        plant=gather_rows_in_another_order,
        causes=(Cause.PERMUTED,),
        minimum=Minimum(layers=2, because="it takes a layer before it to leave its output by rows"),
    ),
    Mutant(
        name="masks_drawn_on_each_rank",
        wrong="Tensor-parallel ranks drop other activations than the first of them does.",
        family=Family.TENSOR_PARALLEL,
        layouts=WITH_A_PLAN,
        applies=both(is_eager, _drops_on_several),
        plant=draw_masks_on_each_rank,
        causes=(Cause.ANOTHER_MASK, Cause.RANKS_DISAGREE),
        minimum=Minimum(because="one rank is the first"),
    ),
)
"""Every such mutant."""
