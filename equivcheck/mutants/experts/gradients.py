"""Gradients under expert parallelism: experts reduced as if replicated, other parameters as if not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from equivcheck.layouts.base.dtensor_experts import shards_over_ep
from equivcheck.mutants.experts.exchange import EXPERT_PARALLEL, has_equal_experts
from equivcheck.mutants.experts.sites import experts_of, has_experts
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import all_of, is_eager
from equivcheck.mutants.rank import axis_names, mesh_of, size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.scenario.mesh import EP
from equivcheck.training.read import local_values
from equivcheck.training.setup import Setup

Named = Callable[[str], bool]
OWN_ROWS = (Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART, Cause.RANKS_DISAGREE)
"""Correct diagnoses for gradients that are not reduced over expert-parallel ranks, with or without outer data parallelism."""


def _has_ranks(scenario: Scenario) -> bool:
    return is_eager(scenario) and scenario.layout.mesh.size(EP) > 1


def _reduces_explicitly(scenario: Scenario) -> bool:
    return not shards_over_ep(scenario.layout)


def _names_of_experts(setup: Setup) -> set[str]:
    own = {parameter for module in experts_of(setup) for parameter in module.units().parameters()}
    return {name for name, parameter in setup.model.named_parameters() if parameter in own}


def _multiply(setup: Setup, factor: float, chosen: Named) -> None:
    """Multiply some gradients after their reduction."""
    parameters = _parameters(setup, chosen)

    def multiply(_optimizer: object, _step: int) -> None:
        for gradient in _gradients(parameters):
            gradient.mul_(factor)

    setup.before_update.append(multiply)


def _parameters(setup: Setup, chosen: Named) -> list[torch.Tensor]:
    """Parameters as the optimizer has them, collected before any forward."""
    return [parameter for name, parameter in setup.model.named_parameters() if chosen(name)]


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (parameter.grad for parameter in parameters if parameter.grad is not None)


def keep_own_gradients(setup: Setup, chosen: Named) -> None:
    """Undo the reduction of some gradients: each keeps its value from right after backward.

    `chosen` selects parameters by name.
    """
    own: list[torch.Tensor] = []
    parameters = _parameters(setup, chosen)

    def keep(_optimizer: object, _step: int) -> None:
        own[:] = [gradient.detach().clone() for gradient in _gradients(parameters)]

    def put_back(_optimizer: object, _step: int) -> None:
        for gradient, kept in zip(_gradients(parameters), own, strict=True):
            gradient.copy_(kept)

    setup.before_update.insert(0, keep)
    setup.before_update.append(put_back)


@fault(layouts=EXPERT_PARALLEL, applies=all_of(has_experts(), _has_ranks), causes=(Cause.SUMMED, Cause.SCALED))
def expert_gradients_summed(setup: Setup) -> None:
    """Bug: expert gradients are not divided by the number of expert-parallel ranks, although they add up all ranks' rows."""
    _multiply(setup, size_of(setup, EP), _names_of_experts(setup).__contains__)


@fault(layouts=EXPERT_PARALLEL, applies=all_of(has_experts(), _has_ranks), causes=(Cause.AVERAGED_TWICE, Cause.SCALED))
def expert_gradients_averaged_twice(setup: Setup) -> None:
    """Bug: expert gradients are divided twice by the number of expert-parallel ranks."""
    _multiply(setup, 1 / size_of(setup, EP), _names_of_experts(setup).__contains__)


@fault(layouts=EXPERT_PARALLEL, applies=all_of(has_experts(), _has_ranks, has_equal_experts), causes=(Cause.REDUCED_OVER_OTHERS,))
def expert_gradients_averaged_as_replicated(setup: Setup) -> None:
    """Bug: expert gradients are averaged over ranks with different experts, as if the experts were replicated."""
    parameters, size = _parameters(setup, _names_of_experts(setup).__contains__), size_of(setup, EP)
    group = mesh_of(setup).get_group(axis_names(setup).index(EP))

    def average(_optimizer: object, _step: int) -> None:
        for gradient in map(local_values, _gradients(parameters)):
            gradient.mul_(size)
            dist.all_reduce(gradient, group=group)
            gradient.div_(size)

    setup.before_update.append(average)


@fault(layouts=EXPERT_PARALLEL, applies=all_of(has_experts(), _has_ranks, _reduces_explicitly), causes=OWN_ROWS)
def router_gradient_of_own_rows(setup: Setup) -> None:
    """Bug: router gradients are not reduced over expert-parallel ranks."""
    keep_own_gradients(setup, lambda name: name.endswith("router.weight"))


@fault(layouts=EXPERT_PARALLEL, applies=all_of(_has_ranks, _reduces_explicitly), causes=OWN_ROWS)
def only_experts_reduced(setup: Setup) -> None:
    """Bug: only expert gradients are right; all others are not reduced over expert-parallel ranks."""
    names = _names_of_experts(setup)
    keep_own_gradients(setup, lambda name: name not in names)


@fault(layouts=EXPERT_PARALLEL, applies=_has_ranks, causes=(Cause.SUMMED, Cause.SCALED))
def all_but_experts_summed(setup: Setup) -> None:
    """Bug: all gradients except the experts' are summed over expert-parallel ranks, not averaged."""
    names = _names_of_experts(setup)
    _multiply(setup, size_of(setup, EP), lambda name: name not in names)
