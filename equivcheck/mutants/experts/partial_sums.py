"""Experts with tensor-parallel hidden features, whose outputs are partial sums: gradients not summed, and other faults."""

from __future__ import annotations

from collections.abc import Callable

import torch

from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.base.plan.rules import num_routing_weights
from equivcheck.layouts.parallelisms.local_tensor_parallel.modules import LocalRegion
from equivcheck.mutants.experts.sites import any_experts, experts_of
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import is_eager, layouts_with
from equivcheck.mutants.rank import layout_of, size_of
from equivcheck.mutants.tensor_parallel.shards import overwrite_initial_values
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Experts, Layout, LocalTensorParallel, Model, Scenario
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.material import material
from equivcheck.training.setup import Setup

LOCAL = layouts_with(LocalTensorParallel.tag)


def _cut_layers(model: Model, layout: Layout) -> tuple[int, ...]:
    """Return the expert layers with hidden features split over several ranks."""
    plans = layout.of(LocalTensorParallel) if layout.mesh.size(TP) > 1 else ()
    return tuple(
        index
        for plan in plans
        for index, (layer, entry) in enumerate(zip(model.layers, plan.plan, strict=False))
        if isinstance(layer, Experts) and num_routing_weights(layer, entry.split) is not None
    )


def _cuts(chosen: Callable[[Experts], bool] = any_experts) -> Callable[[Scenario], bool]:
    """Whether nothing is compiled or traced, and an expert layer has split hidden features."""

    def applies(scenario: Scenario) -> bool:
        model = scenario.training.model
        found = (model.layers[index] for index in _cut_layers(model, scenario.layout)) if is_eager(scenario) else ()
        return any(isinstance(layer, Experts) and chosen(layer) for layer in found)

    return applies


def _has_bias(layer: Experts) -> bool:
    return layer.bias


def _has_halves(layer: Experts) -> bool:
    """Whether splitting the fused gate and up weights over two ranks changes the halves."""
    return layer.hidden > 1


def _move_by(setup: Setup, kind: type[LocalRegion]) -> None:
    for module in experts_of(setup):
        honest = module.region
        if isinstance(honest, LocalRegion):
            region = kind(honest.ranks, honest.enter, honest.use, honest.leave)
            module.region = module.experts.region = region
            if module.shared is not None:
                module.shared.region = region


class _CopiesNothing(LocalRegion):
    def copy_to_ranks(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values, weights


@fault(layouts=LOCAL, applies=_cuts(), causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE))
def experts_copy_to_region_missing(setup: Setup) -> None:
    """Bug: neither the experts' input gradient nor the routing weights' gradient is summed over tensor-parallel ranks."""
    _move_by(setup, _CopiesNothing)


class _CopiesRows(LocalRegion):
    def copy_to_ranks(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().copy_to_ranks(values, weights)[0], weights


@fault(layouts=LOCAL, applies=_cuts(), causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE))
def router_learns_from_partial_sum(setup: Setup) -> None:
    """Bug: the routing weights' gradient is not summed over tensor-parallel ranks, so each router learns from a partial sum."""
    _move_by(setup, _CopiesRows)


class _AddsEach(LocalRegion):
    def bias_on_first_rank(self, bias: torch.Tensor) -> torch.Tensor:
        return bias


@fault(layouts=LOCAL, applies=_cuts(_has_bias), causes=(Cause.BIAS_ON_EVERY_RANK,))
def bias_of_experts_added_on_every_rank(setup: Setup) -> None:
    """Bug: each tensor-parallel rank adds the bias in the experts' down projection, so it counts several times."""
    _move_by(setup, _AddsEach)


@fault(layouts=LOCAL, applies=_cuts(_has_halves), causes=(Cause.PERMUTED, Cause.UNEQUAL_START))
def gate_and_up_of_experts_split_as_one(setup: Setup) -> None:
    """Bug: the experts' gate and up projections are fused before they are split over ranks, so each rank gets wrong halves."""
    initial, found = material(setup.training).parameters, dict[str, torch.Tensor]()
    layers, ranks = _cut_layers(setup.training.model, layout_of(setup)), size_of(setup, TP)
    for each in parameters_of(setup.training.model):
        owner, _, name = each.full_name.rpartition(".")
        if each.layer in layers and name in ("gate", "gate_bias"):
            gate, up = each.full_name, f"{owner}.{name.replace('gate', 'up')}"
            found[gate], found[up] = _cut_as_one(initial[gate], initial[up], each.unit_dim or 0, ranks)
    overwrite_initial_values(setup, found)


def _cut_as_one(gate: torch.Tensor, up: torch.Tensor, dim: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up shards in rank order, as splitting the fused projection gives them."""
    sizes = chunk_sizes(gate.shape[dim], ranks)
    parts = torch.split(torch.cat((gate, up), dim), [2 * size for size in sizes], dim)
    halves = [torch.split(part, [size, size], dim) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat([half[0] for half in halves], dim), torch.cat([half[1] for half in halves], dim)
