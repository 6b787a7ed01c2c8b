"""Tensor parallelism on plain tensors with a missing or wrong collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from equivcheck.layouts.base.partition import is_last_shard_empty
from equivcheck.layouts.base.plan.linears import ActivationPlacement
from equivcheck.layouts.parallelisms.local_tensor_parallel.modules import LocalEmbedding, LocalLinear, LocalNorm
from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import PlannedModule, Redistribution, planned_modules
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import all_of, is_eager, layouts_with
from equivcheck.mutants.rank import size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import LocalTensorParallel, Scenario
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.setup import Setup

PLAIN = layouts_with(LocalTensorParallel.tag)
AFTER_A_LAYER = Minimum(layers=2, because="the layer before must leave its output sharded by rows")


def _plans(chosen: Callable[[PlannedModule], bool]) -> Callable[[Scenario], bool]:
    """Whether the scenario's plan has such a module, over several ranks."""

    def applies(scenario: Scenario) -> bool:
        plans = scenario.layout.of(LocalTensorParallel)
        if not plans or scenario.layout.mesh.size(TP) == 1 or not is_eager(scenario):
            return False
        return any(map(chosen, planned_modules(scenario.training.model, plans[0])))

    return applies


def _sums_gradient(planned: PlannedModule) -> bool:
    """Whether partial input gradients are summed over ranks."""
    return planned.enter is not None and _is_copied(planned.enter)


def _is_copied(enter: Redistribution) -> bool:
    whole, pending = ActivationPlacement.REPLICATED, ActivationPlacement.PARTIAL
    return (enter.gradient_source, enter.gradient_target) == (pending, whole)


def _sums_output(planned: PlannedModule) -> bool:
    return planned.enter is not None and planned.leave is not None and _is_summed(planned.leave)


def _is_summed(leave: Redistribution) -> bool:
    return (leave.source, leave.target) == (ActivationPlacement.PARTIAL, ActivationPlacement.REPLICATED)


def _is_norm(planned: PlannedModule) -> bool:
    return planned.leave is None


def _is_on_rows(planned: PlannedModule) -> bool:
    return planned.enter is not None and planned.enter.target is ActivationPlacement.ROWS


def _shares_out_tokens(planned: PlannedModule) -> bool:
    return planned.enter is None and planned.leave is not None and planned.dims[0] == 0


def _linears(setup: Setup) -> Iterator[LocalLinear]:
    return (module for module in setup.model.modules() if isinstance(module, LocalLinear))


class _KeepsOwn(AxisRanks):
    """Bug: ranks do not sum gradients for replicated parameters."""

    __slots__ = ()

    def copy_to_region(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter without a reduction in backward."""
        return parameter


def _kept_own(ranks: AxisRanks) -> AxisRanks:
    return _KeepsOwn(group=ranks.group, size=ranks.size, index=ranks.index, rows=ranks.rows)


@fault(
    layouts=PLAIN,
    applies=_plans(_is_norm),
    causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART, Cause.RANKS_DISAGREE),
    minimum=AFTER_A_LAYER,
)
def norm_gradient_of_own_rows(setup: Setup) -> None:
    """Bug: on plain tensors, norm gradients are not summed over ranks with different rows or positions."""
    for module in setup.model.modules():
        if isinstance(module, LocalNorm):
            module.ranks = _kept_own(module.ranks)


@fault(
    layouts=PLAIN,
    applies=_plans(_is_on_rows),
    causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART, Cause.RANKS_DISAGREE),
    minimum=AFTER_A_LAYER,
)
def replicated_weight_gradient_of_own_rows(setup: Setup) -> None:
    """Bug: on plain tensors, gradients for a replicated layer are not summed over ranks with different rows or positions."""
    for module in _linears(setup):
        if module.enter.target is ActivationPlacement.ROWS:
            _keep_own(module, module.ranks)


def _keep_own(module: LocalLinear, ranks: AxisRanks) -> None:
    """Replace the parameters before each forward, because a microbatch brings its own rows."""

    def keep_own_ranks(_module: nn.Module, _inputs: Any) -> None:
        module.ranks = _kept_own(ranks)

    module.register_forward_pre_hook(keep_own_ranks)


@fault(layouts=PLAIN, applies=_plans(_sums_gradient), causes=(Cause.PARTIAL_INPUT_GRADIENT, Cause.RANKS_DISAGREE))
def copy_to_region_missing(setup: Setup) -> None:
    """Bug: on plain tensors, the input gradient for a column-parallel layer is not summed over ranks."""
    for module in _linears(setup):
        if _is_copied(module.enter):
            module.enter = replace(module.enter, gradient_source=module.enter.gradient_target)


@fault(layouts=PLAIN, applies=_plans(_sums_output), causes=(Cause.PARTIAL_OUTPUT, Cause.RANKS_DISAGREE))
def reduce_from_region_missing(setup: Setup) -> None:
    """Bug: on plain tensors, the output from a row-parallel layer is not summed over ranks."""
    for module in _linears(setup):
        if _is_summed(module.leave):
            module.leave = replace(module.leave, source=module.leave.target)


@fault(layouts=PLAIN, applies=_plans(_sums_output), causes=(Cause.OUTPUT_AVERAGED,))
def reduce_from_region_averages(setup: Setup) -> None:
    """Bug: on plain tensors, the output from a row-parallel layer is averaged over ranks instead of summed."""
    for module in _linears(setup):
        if _is_summed(module.leave):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0] / module.ranks.size,))


def _has_summed_bias(scenario: Scenario) -> bool:
    plans = scenario.layout.of(LocalTensorParallel)
    names = {
        f"{each.name}.bias" for plan in plans for each in planned_modules(scenario.training.model, plan) if _sums_output(each)
    }
    return bool(names & set(_biases(scenario)))


def _biases(scenario: Scenario) -> Iterator[str]:
    return (each.full_name for each in parameters_of(scenario.training.model) if each.full_name.endswith(".bias"))


@fault(layouts=PLAIN, applies=all_of(_plans(_sums_output), _has_summed_bias), causes=(Cause.BIAS_ON_EVERY_RANK,))
def bias_within_reduce_from_region(setup: Setup) -> None:
    """Bug: on plain tensors, each rank adds a row-parallel layer's bias before the sum, so it counts several times."""

    def add_bias_again(module: Any, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        times: int = module.ranks.size - 1
        bias: torch.Tensor = module.bias.detach()
        return outputs + times * bias

    for module in _linears(setup):
        if _is_summed(module.leave) and module.bias is not None:
            module.register_forward_hook(add_bias_again)


@fault(layouts=PLAIN, applies=_plans(_shares_out_tokens), causes=(Cause.ANOTHER_ROW,))
def tokens_of_others_looked_up(setup: Setup) -> None:
    """Bug: on plain tensors, each rank also embeds other ranks' tokens, with rows of its own shard instead of zeros."""
    for module in setup.model.modules():
        if isinstance(module, LocalEmbedding) and module.start is not None:
            _look_up_all(module)


def _look_up_all(module: Any) -> None:
    own_tokens: Callable[[torch.Tensor, int], torch.Tensor] = module.own_tokens

    def all_tokens(tokens: torch.Tensor, start: int) -> torch.Tensor:
        num_rows = module.weight.shape[0]
        return own_tokens((tokens - start) % num_rows + start if num_rows else tokens, start)

    module.own_tokens = all_tokens


def _has_parted_loss(scenario: Scenario) -> bool:
    plans = scenario.layout.of(LocalTensorParallel)
    parted = any(plan.loss_parallel for plan in plans) and scenario.layout.mesh.size(TP) > 1
    return (
        parted
        and is_eager(scenario)
        and not is_last_shard_empty(scenario.training.model.out_features, scenario.layout.mesh.size(TP))
    )


@fault(layouts=PLAIN, applies=_has_parted_loss, causes=(Cause.SOFTMAX_OF_PART,))
def maximum_of_own_logits(setup: Setup) -> None:
    """Bug: on plain tensors, each rank subtracts its own maximum logit before the exponentials are summed over ranks."""
    inner = setup.loss
    if size_of(setup, TP) > 1:
        setup.loss = lambda training, logits, *rest: inner(training, logits - logits.detach().amax(-1, keepdim=True), *rest)
