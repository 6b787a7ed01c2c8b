"""Experts wrapped by `fully_shard` with a wrong gradient divisor."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from equivcheck.layouts.base import gradients_by_hand
from equivcheck.layouts.base.dtensor_experts import dtensor_experts, expert_modules, has_expert_units
from equivcheck.layouts.parallelisms.fsdp2.division import expert_divide_factor
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.rank import layout_of, size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import FSDP2, Scenario
from equivcheck.scenario.mesh import EP
from equivcheck.training.setup import Setup

WITH_EXPERT_UNITS = ("fsdp2 x expert_parallel", "fsdp2 x pipeline x expert_parallel")
"""Layouts whose experts may be DTensors, and separate `fully_shard` units."""


def _divides_units(scenario: Scenario) -> bool:
    """Whether experts are `fully_shard` units on several expert-parallel ranks, and trained."""
    layout, model = scenario.layout, scenario.training.model
    is_divided = has_expert_units(layout) and layout.mesh.size(EP) > 1
    return is_eager(scenario) and is_divided and any(found.trained for found in dtensor_experts(model, layout))


@fault(layouts=WITH_EXPERT_UNITS, applies=_divides_units, causes=(Cause.SUMMED, Cause.SCALED))
def expert_units_without_divide_factor(setup: Setup) -> None:
    """Bug: `fully_shard` divides expert gradients without counting the expert-parallel ranks."""
    (fsdp,) = layout_of(setup).of(FSDP2)
    factor = expert_divide_factor(fsdp, layout_of(setup)) / size_of(setup, EP)
    for unit in expert_modules(setup.model):
        assert isinstance(unit, FSDPModule), "every expert unit is an FSDPModule"
        unit.set_gradient_divide_factor(factor)


@fault(layouts=WITH_EXPERT_UNITS, applies=_divides_units, causes=(Cause.AVERAGED_TWICE, Cause.SCALED))
def expert_units_divided_explicitly_too(setup: Setup) -> None:
    """Bug: expert gradients are divided explicitly, although `fully_shard` has divided them already."""
    model, ranks = setup.model, size_of(setup, EP)

    def divide(_optimizer: object, _step: int) -> None:
        parameters = [parameter for unit in expert_modules(model) for parameter in unit.parameters()]
        gradients_by_hand.divide_gradients(parameters, ranks)

    setup.before_update.append(divide)
