"""All-reduce hooks of `fully_shard` that reduce gradients wrongly over replicas."""

from __future__ import annotations

from functools import partial

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.rank import axis_names, mesh_of
from equivcheck.mutants.torch_private import fsdp_modules
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP2, Scenario, Wrapping
from equivcheck.scenario.mesh import REPLICATE
from equivcheck.training.setup import Setup


def _hooks(scenario: Scenario) -> bool:
    """Whether a hook averages over several replicas."""
    has_hook = any(fsdp.replica_hook and fsdp.gradient_divide_factor is None for fsdp in scenario.layout.of(FSDP2))
    return is_eager(scenario) and has_hook and scenario.layout.mesh.size(REPLICATE) > 1


def _hooks_units(scenario: Scenario) -> bool:
    return _hooks(scenario) and any(fsdp.wrapping is Wrapping.PER_LAYER for fsdp in scenario.layout.of(FSDP2))


def _reduce_nothing(_reduced: torch.Tensor) -> None:
    pass


@fault(layouts=("fsdp2",), applies=_hooks, causes=(Cause.SUMMED, Cause.SCALED))
def replica_hook_sums(setup: Setup) -> None:
    """Bug: the hook sums gradients over replicas, but does not divide them by the number of replicas."""
    if REPLICATE in axis_names(setup):
        group = mesh_of(setup).get_group(REPLICATE)
        for module in fsdp_modules(setup):
            module.set_all_reduce_hook(partial(dist.all_reduce, group=group))


@fault(layouts=("fsdp2",), applies=_hooks_units, causes=(Cause.REDUCED_OVER_PART, Cause.NOT_REDUCED))
def replica_hook_of_root_only(setup: Setup) -> None:
    """Bug: only the root has a hook, so the gradients of layers are not reduced over replicas."""
    for name, module in setup.model.named_modules():
        if name and isinstance(module, FSDPModule):
            module.set_all_reduce_hook(_reduce_nothing)
