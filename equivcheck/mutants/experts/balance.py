"""The load-balancing loss with wrong counts or a wrong weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from equivcheck.layouts.base.data_rows import sum_counts
from equivcheck.layouts.base.expected_calls.shared import AXES
from equivcheck.layouts.parallelisms.pipeline.balance import StageBalance
from equivcheck.layouts.parallelisms.pipeline.schedules import pipe_of
from equivcheck.layouts.parallelisms.pipeline.stages import balanced_before_last_stage, num_stages
from equivcheck.mutants.experts.sites import PLAIN_ROUTERS, experts_of, has_experts
from equivcheck.mutants.mutant import ONE_RANK, Minimum, fault
from equivcheck.mutants.needs import all_of, has_chunks, has_microbatches, is_eager, layouts_with, wraps_the_model
from equivcheck.mutants.rank import axis_names, mesh_of, num_microbatches, size_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    ContextParallel,
    ExpertParallel,
    Experts,
    LocalDataParallel,
    Pipeline,
    Replicate,
    Scenario,
)
from equivcheck.scenario.mesh import CP
from equivcheck.training.balance import Counts, counts_of_microbatch, is_per_sequence
from equivcheck.training.layers.experts.module import Router
from equivcheck.training.layers.module import RoutingLoad
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

COUNTED = layouts_with(*(kind.tag for kind in (DDP, Replicate, FSDP1, FSDP2, ExpertParallel, ContextParallel, LocalDataParallel)))
"""Layouts whose ranks share expert counts."""
CAUSES = (Cause.EXPERT_BALANCE,)


def _balances(layer: Experts) -> bool:
    return layer.balance > 0


def _balances_microbatches(layer: Experts) -> bool:
    return layer.balance > 0 and not layer.balance_per_sequence


def _balances_sequences(layer: Experts) -> bool:
    return layer.balance_per_sequence


def _shares_counts(scenario: Scenario) -> bool:
    """Whether several ranks sum the counts of some layer's load-balancing loss."""
    if has_experts(_balances_microbatches)(scenario):
        return is_counted(scenario)
    return has_experts(_balances_sequences)(scenario) and scenario.layout.mesh.size(CP) > 1


def is_counted(scenario: Scenario) -> bool:
    """Whether several ranks have different rows or positions."""
    return scenario.layout.mesh.size(*AXES) > 1


def is_counted_elsewhere(scenario: Scenario) -> bool:
    """Whether several ranks differ along an axis other than the last."""
    mesh = scenario.layout.mesh
    return mesh.size(*(name for name in AXES if name != _last([axis.name for axis in mesh.axes if axis.size > 1]))) > 1


def _last(names: list[str]) -> str:
    return names[-1] if names else ""


def _has_equal_microbatches(scenario: Scenario) -> bool:
    return len(set(scenario.training.data.microbatches)) == 1


@fault(layouts=COUNTED, applies=_shares_counts, causes=CAUSES)
def balance_of_own_rows(setup: Setup) -> None:
    """Bug: the load-balancing loss uses each rank's own expert counts, which are not summed over ranks."""
    setup.full_counts = counts_of_microbatch


@fault(
    layouts=COUNTED,
    applies=all_of(has_experts(_balances_microbatches), is_counted_elsewhere),
    causes=CAUSES,
    minimum=Minimum(ranks=4, because="it takes two axes with two ranks each"),
)
def balance_counted_along_last_axis(setup: Setup) -> None:
    """Bug: the load-balancing loss uses expert counts summed over the last mesh axis only."""
    setup.full_counts = counts_of_microbatch
    last = last_axis(setup)
    sum_counts(setup, mesh_of(setup).get_group(last), splits_sequences=axis_names(setup)[last] == CP)


def last_axis(setup: Setup) -> int:
    """Return the index of the last mesh axis with several ranks."""
    names = axis_names(setup)
    return names.index(_last([name for name in names if size_of(setup, name) > 1]))


def _reweigh(setup: Setup, factor: float) -> None:
    for module in experts_of(setup, _balances):
        _change(module.router, lambda load: load._replace(balance=load.balance * factor))


def _change(router: Router, change: Callable[[RoutingLoad], RoutingLoad]) -> None:
    router.load_of = partial(_changed, router.load_of, change)  # type: ignore[method-assign]


def _changed(
    load_of: Callable[[torch.Tensor, torch.Tensor], RoutingLoad],
    change: Callable[[RoutingLoad], RoutingLoad],
    scores: torch.Tensor,
    chosen: torch.Tensor,
) -> RoutingLoad:
    return change(load_of(scores, chosen))


@fault(layouts=COUNTED, applies=all_of(has_experts(_balances), is_counted), causes=CAUSES)
def balance_divided_by_ranks(setup: Setup) -> None:
    """Bug: the load-balancing loss is divided by the number of ranks, although it is already averaged."""
    _reweigh(setup, 1 / size_of(setup, *AXES))


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(_balances), causes=CAUSES, minimum=ONE_RANK)
def balance_counted_twice(setup: Setup) -> None:
    """Bug: the load-balancing loss is added twice, as if recomputation in backward added it again."""
    _reweigh(setup, 2)


@fault(
    layouts=PLAIN_ROUTERS,
    applies=all_of(has_experts(_balances), has_microbatches, _has_equal_microbatches),
    causes=CAUSES,
    minimum=ONE_RANK,
)
def balance_summed_over_microbatches(setup: Setup) -> None:
    """Bug: the load-balancing loss is summed over microbatches, not averaged."""
    _reweigh(setup, num_microbatches(setup))


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(_balances), causes=CAUSES, minimum=ONE_RANK)
def balance_without_gradient(setup: Setup) -> None:
    """Bug: the load-balancing loss has no gradient, because scores are detached."""
    for module in experts_of(setup, _balances):
        _change(module.router, lambda load: load._replace(shares=load.shares.detach()))


@fault(
    layouts=PLAIN_ROUTERS,
    applies=all_of(has_experts(_balances_microbatches), has_microbatches),
    causes=CAUSES,
    minimum=ONE_RANK,
)
def choices_of_earlier_microbatches_counted(setup: Setup) -> None:
    """Bug: the load-balancing loss uses expert counts accumulated since the step began, not for one microbatch."""
    inner, kept = setup.full_counts, list[torch.Tensor]()

    def full_counts(model: nn.Module, counts: Counts, batch: Batch, index: int) -> Counts:
        found = inner(model, counts, batch, index)
        before = kept or [torch.zeros_like(each) for each in found]
        kept[:] = [each if is_per_sequence(each) else old + each for old, each in zip(before, found, strict=True)]
        return list(kept)

    setup.full_counts = full_counts
    setup.before_step.append(lambda _optimizer, _index: kept.clear())


def _has_several_sequences(scenario: Scenario) -> bool:
    return max(scenario.training.data.microbatches) > 1


@fault(
    layouts=PLAIN_ROUTERS,
    applies=all_of(has_experts(_balances_sequences), wraps_the_model, _has_several_sequences),
    causes=CAUSES,
    minimum=ONE_RANK,
)
def sequence_balance_over_microbatch(setup: Setup) -> None:
    """Bug: a load-balancing loss for each sequence is computed over all sequences of a microbatch together."""
    for module in experts_of(setup, _balances_sequences):
        _change(module.router, lambda load: load._replace(counts=load.counts.sum(0), shares=load.shares.sum(0)))


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=all_of(has_experts(_balances), has_chunks),
    causes=CAUSES,
    minimum=ONE_RANK,
)
def balance_gradient_summed_over_chunks(setup: Setup) -> None:
    """Bug: the gradients of load-balancing losses are summed over a pipeline's chunks, although the main loss is averaged."""
    assert setup.layout is not None, "a layout is applied"
    pipe = pipe_of(setup)
    for stage in () if pipe is None else pipe.modules.values():
        if isinstance(stage.balance, StageBalance):
            stage.balance.scale *= setup.layout.num_chunks


def _balances_before_last_stage(scenario: Scenario) -> bool:
    return is_eager(scenario) and bool(balanced_before_last_stage(scenario.training.model, scenario.layout))


@fault(
    layouts=layouts_with(Pipeline.tag),
    applies=_balances_before_last_stage,
    causes=CAUSES,
    minimum=Minimum(layers=2, because="it takes two stages with a layer each"),
)
def balance_of_last_stage_only(setup: Setup) -> None:
    """Bug: only the last pipeline stage adds its load-balancing losses, because only this stage computes the main loss."""
    assert setup.layout is not None, "a layout is applied"
    pipe = pipe_of(setup)
    for number, stage in () if pipe is None else pipe.modules.items():
        if number < num_stages(setup.layout) - 1:
            stage.balance = None
