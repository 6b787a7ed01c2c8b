"""Tensor-parallel shards in the wrong order, along the wrong dim, or with different dropout masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.layouts.base.plan.rules import LayerSite
from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import all_of, is_eager
from equivcheck.mutants.parameter_use import transform
from equivcheck.mutants.precision import other_mask
from equivcheck.mutants.rank import rank_along
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL, Planned, blocks, has_layer
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ActivationSharding, Scenario, Split
from equivcheck.scenario.mesh import TP
from equivcheck.training.material import Batch, material
from equivcheck.training.read import local_values
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.trace import Piece


def _is_square(layer: Planned) -> bool:
    """Whether the layer is split, and its weight is square, so a shard along the wrong dim fits."""
    width = layer.site.width
    return layer.plan.split in (Split.COLWISE, Split.ROWWISE) and width == layer.site.model.in_features(layer.site.index) > 1


def _has_halves(layer: Planned) -> bool:
    """Whether the layer is column-parallel, and each half is divisible by the number of ranks."""
    return layer.plan.split is Split.COLWISE and layer.site.width % (2 * layer.site.tp) == 0


def _is_gathered(layer: Planned) -> bool:
    return layer.plan.split is Split.COLWISE and layer.plan.output is ActivationSharding.REPLICATED and layer.site.width > 1


def _tells_order(scenario: Scenario) -> bool:
    """Whether feature order matters. A linear loss does not depend on the last layer's order."""
    adds_up = scenario.training.loss.is_linear
    return has_layer(lambda layer: _is_gathered(layer) and not (adds_up and _ends_alike(layer.site)))(scenario)


def _ends_alike(site: LayerSite) -> bool:
    return site.index == len(site.model.layers) - 1 and not site.layer.dropout


def _gathers_rows(layer: Planned) -> bool:
    return layer.plan.split is Split.COLWISE and layer.site.input is ActivationSharding.ROWS


def _tells_rows(scenario: Scenario) -> bool:
    """Whether the loss depends on the order of rows. A linear loss adds up all outputs, without targets."""
    return not scenario.training.loss.is_linear


def _drops_on_several(scenario: Scenario) -> bool:
    return scenario.layout.mesh.size(TP) > 1 and any(layer.dropout for layer in scenario.training.model.layers)


@fault(layouts=TENSOR_PARALLEL, applies=all_of(is_eager, has_layer(_is_square)), causes=(Cause.PERMUTED,))
def sharded_along_wrong_dim(setup: Setup) -> None:
    """Bug: a square weight is sharded along the wrong dim."""
    _change_weights(setup, _is_square, ("linear.weight", "auxiliary.weight"), lambda weight, _layer: weight.T)


@fault(layouts=TENSOR_PARALLEL, applies=all_of(is_eager, has_layer(_has_halves)), causes=(Cause.PERMUTED,))
def fused_weight_split_in_halves(setup: Setup) -> None:
    """Bug: a column-parallel weight is split as if it were two fused weights, so each rank gets parts of both halves."""
    _change_weights(setup, _has_halves, ("linear.weight", "linear.bias", "auxiliary.weight"), _halves_interleaved)


def _halves_interleaved(whole: torch.Tensor, layer: Planned) -> torch.Tensor:
    return whole.reshape(2, layer.site.tp, -1).transpose(0, 1).reshape(whole.shape)


def _change_weights(
    setup: Setup,
    chosen: Callable[[Planned], bool],
    names: tuple[str, ...],
    change: Callable[[torch.Tensor, Planned], torch.Tensor],
) -> None:
    initial, found = material(setup.training).parameters, {}
    for _, layer in blocks(setup, chosen):
        for name in (f"layers.{layer.site.index}.{name}" for name in names):
            if name in initial:
                found[name] = change(initial[name], layer)
    overwrite_initial_values(setup, found)


@torch.no_grad()
def overwrite_initial_values(setup: Setup, values: Mapping[str, torch.Tensor]) -> None:
    """Overwrite this rank's parameter shards with values from the full tensors in `values`, by parameter name."""
    for slot in setup.find_slots(setup.model):
        local, start = local_values(slot.parameter), 0
        flat = local.reshape(-1).clone()
        for piece in slot.pieces:
            if piece.name in values and piece.numel:
                flat[start : start + piece.numel] = _part(values[piece.name], piece)
            start += piece.numel
        local.copy_(flat.view(local.shape))


def _part(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the piece's elements, in order."""
    for dim, (first, extent) in enumerate(zip(piece.start, piece.size, strict=True)):
        whole = whole.narrow(dim, first, extent)
    flat = whole.reshape(-1)
    return flat if piece.run is None else flat.narrow(0, *piece.run)


@fault(layouts=TENSOR_PARALLEL, applies=all_of(is_eager, _tells_order), causes=(Cause.PERMUTED,))
def columns_gathered_in_another_order(setup: Setup) -> None:
    """Bug: a column-parallel layer's output shards are gathered in the wrong order."""

    def roll(_module: nn.Module, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.roll(-(-outputs.shape[-1] // tp), dims=-1)

    for block, layer in blocks(setup, _is_gathered):
        tp = layer.site.tp
        block.linear.register_forward_hook(roll)


@fault(
    layouts=TENSOR_PARALLEL,
    applies=all_of(is_eager, _tells_rows, has_layer(_gathers_rows)),
    causes=(Cause.PERMUTED,),
    minimum=Minimum(layers=2, because="the layer before must leave its output sharded by rows"),
)
def rows_gathered_in_another_order(setup: Setup) -> None:
    """Bug: under sequence parallelism, rows are gathered in the wrong order."""

    def roll(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (transform(inputs[0], values=lambda x: _rolled(x, 1), gradients=lambda x: _rolled(x, -1)), *inputs[1:])

    for block, _ in blocks(setup, _gathers_rows):
        block.linear.register_forward_pre_hook(roll)


def _rolled(tensor: Any, shards: int) -> torch.Tensor:
    """Shift a gathered DTensor's rows by some ranks."""
    local, mesh = tensor.to_local(), tensor.device_mesh
    moved = local.roll(shards * (local.shape[0] // mesh.size()), dims=0)
    return DTensor.from_local(moved, mesh, tensor.placements, run_check=False)


@fault(layouts=TENSOR_PARALLEL, applies=all_of(is_eager, _drops_on_several), causes=(Cause.ANOTHER_MASK, Cause.RANKS_DISAGREE))
def masks_drawn_on_each_rank(setup: Setup) -> None:
    """Bug: tensor-parallel ranks draw different dropout masks."""
    if rank_along(setup, TP) == 0:
        return
    inner, layers = setup.take, setup.training.model.layers

    def take(batch: Batch) -> Batch:
        batch = inner(batch)
        pairs = zip(batch.masks, layers, strict=True)
        return replace(batch, masks=tuple(None if mask is None else other_mask(mask, layer) for mask, layer in pairs))

    setup.take = take
