"""Divide factors of `fully_shard` that do not match the loss."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import has_data_ranks
from equivcheck.mutants.rank import data_ranks
from equivcheck.mutants.sharding.reductions import FULLY_SHARDED
from equivcheck.mutants.torch_private import fsdp_modules
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP2, Scenario, Wrapping
from equivcheck.training.setup import Setup


def _sums(scenario: Scenario) -> bool:
    """Whether each rank divides its loss by the rows or tokens of all ranks, so that gradients are only summed."""
    return has_data_ranks(scenario) and any(fsdp.gradient_divide_factor == 1.0 for fsdp in scenario.layout.of(FSDP2))


def _sums_units(scenario: Scenario) -> bool:
    return _sums(scenario) and any(fsdp.wrapping is Wrapping.PER_LAYER for fsdp in scenario.layout.of(FSDP2))


@fault(
    layouts=FULLY_SHARDED,
    applies=_sums,
    causes=(Cause.AVERAGED_TWICE, Cause.SCALED),
    on_dtensor_values=True,
)
def default_divide_factor(setup: Setup) -> None:
    """Bug: the loss is divided by the rows of all ranks, and `fully_shard` divides gradients by the number of ranks as well."""
    for module in fsdp_modules(setup):
        module.set_gradient_divide_factor(float(data_ranks(setup)))


@fault(
    layouts=FULLY_SHARDED,
    applies=_sums_units,
    causes=(Cause.AVERAGED_TWICE, Cause.SCALED),
    minimum=Minimum(because="one layer is a unit of its own, and its gradients are divided"),
    on_dtensor_values=True,
)
def divide_factor_of_root_only(setup: Setup) -> None:
    """Bug: the divide factor 1.0 is set for the root only, so the gradients of layers are divided by the number of ranks."""
    for name, module in setup.model.named_modules():
        if name and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(data_ranks(setup)))
