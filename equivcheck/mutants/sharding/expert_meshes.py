"""Experts with another `fully_shard` mesh than other parameters, and gradients that are reduced over the wrong one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from equivcheck.layouts.base import gradients_by_hand
from equivcheck.layouts.base.dtensor_experts import expert_modules, shards_over_ep
from equivcheck.layouts.parallelisms.fsdp2.division import has_expert_groups
from equivcheck.mutants.experts.units import WITH_EXPERT_UNITS
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.rank import axis_names, layout_of, mesh_of, size_of
from equivcheck.mutants.torch_private import Op, WrongReduceScatter, reduce_experts_with, reduce_outside_experts_with
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP2, Scenario
from equivcheck.scenario.mesh import EP, REPLICATE, SHARD
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.setup import Setup


def _spreads_experts(scenario: Scenario) -> bool:
    """Whether trained experts are sharded over several replicas."""
    layout = scenario.layout
    spreads = any(has_expert_groups(fsdp, layout) for fsdp in layout.of(FSDP2)) and layout.mesh.size(REPLICATE) > 1
    parameters = parameters_of(scenario.training.model)
    return is_eager(scenario) and spreads and any(found.trained and found.expert_dim is not None for found in parameters)


def _trains_over_ep(scenario: Scenario) -> bool:
    """Whether trained parameters outside experts are sharded over several expert-parallel ranks."""
    layout, parameters = scenario.layout, parameters_of(scenario.training.model)
    is_sharded = shards_over_ep(layout) and layout.mesh.size(EP) > 1
    return is_eager(scenario) and is_sharded and any(found.trained and found.expert_dim is None for found in parameters)


class _ReduceOverPart(WrongReduceScatter):
    """Bug: the reduce-scatter takes the mean over some of its ranks only."""

    def __init__(self, part: dist.ProcessGroup) -> None:
        self.part = part

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Sum over the part, and scale like a reduction over all ranks."""
        summed, summands = given.clone(), self.part.size()
        dist.all_reduce(summed, group=self.part)
        output.copy_(summed.view(group.size(), -1)[group.rank()] * ((1 if op == dist.ReduceOp.AVG else group.size()) / summands))


@fault(layouts=("fsdp2",), applies=_spreads_experts, causes=(Cause.REDUCED_OVER_PART, Cause.NOT_REDUCED))
def expert_gradients_not_reduced_over_replicas(setup: Setup) -> None:
    """Bug: the gradients of experts are reduced over `dp_shard` only, although all ranks hold shards of them."""
    if REPLICATE in axis_names(setup):
        reduce_experts_with(setup, _ReduceOverPart(mesh_of(setup).get_group(SHARD)))


@fault(layouts=WITH_EXPERT_UNITS, applies=_trains_over_ep, causes=(Cause.REDUCED_OVER_PART, Cause.NOT_REDUCED))
def gradients_not_reduced_over_ep(setup: Setup) -> None:
    """Bug: the gradients of parameters outside experts are reduced over data-parallel ranks, but not over `ep`."""
    layout = layout_of(setup)
    (fsdp,) = layout.of(FSDP2)
    reduce_outside_experts_with(setup, _ReduceOverPart(mesh_of(setup).get_group(layout.axes_of(fsdp)[-1])))


@fault(layouts=("fsdp2",), applies=_spreads_experts, causes=(Cause.SUMMED, Cause.SCALED))
def expert_gradients_divided_by_shards_only(setup: Setup) -> None:
    """Bug: the gradients of experts are summed over all ranks, but divided by the number of ranks along `dp_shard` only."""
    model, replicas = setup.model, size_of(setup, REPLICATE)

    def multiply(_optimizer: object, _step: int) -> None:
        parameters = [parameter for unit in expert_modules(model) for parameter in unit.parameters()]
        for gradient in gradients_by_hand.held_gradients(parameters):
            gradient.mul_(replicas)

    setup.before_update.append(multiply)
