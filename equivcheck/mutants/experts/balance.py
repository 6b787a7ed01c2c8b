"""The load-balancing loss with wrong counts or a wrong weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from equivcheck.layouts.base.data_rows import sum_counts
from equivcheck.layouts.base.expected_calls.shared import AXES
from equivcheck.mutants.experts.sites import PLAIN_ROUTERS, experts_of, has_experts
from equivcheck.mutants.mutant import ONE_RANK, Minimum, fault
from equivcheck.mutants.needs import all_of, has_microbatches, layouts_with
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
    Replicate,
    Scenario,
)
from equivcheck.training.balance import Counts, counts_of_microbatch
from equivcheck.training.layers.experts.module import Router
from equivcheck.training.layers.module import RoutingLoad
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

COUNTED = layouts_with(*(kind.tag for kind in (DDP, Replicate, FSDP1, FSDP2, ExpertParallel, ContextParallel, LocalDataParallel)))
"""Layouts whose ranks share expert counts."""
CAUSES = (Cause.EXPERT_BALANCE,)


def _balances(layer: Experts) -> bool:
    return layer.balance > 0


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


@fault(layouts=COUNTED, applies=all_of(has_experts(_balances), is_counted), causes=CAUSES)
def balance_of_own_rows(setup: Setup) -> None:
    """Bug: the load-balancing loss uses each rank's own expert counts, which are not summed over ranks."""
    setup.full_counts = counts_of_microbatch


@fault(
    layouts=COUNTED,
    applies=all_of(has_experts(_balances), is_counted_elsewhere),
    causes=CAUSES,
    minimum=Minimum(ranks=4, because="it takes two axes with two ranks each"),
)
def balance_counted_along_last_axis(setup: Setup) -> None:
    """Bug: the load-balancing loss uses expert counts summed over the last mesh axis only."""
    setup.full_counts = counts_of_microbatch
    sum_counts(setup, mesh_of(setup).get_group(last_axis(setup)))


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


@fault(layouts=PLAIN_ROUTERS, applies=all_of(has_experts(_balances), has_microbatches), causes=CAUSES, minimum=ONE_RANK)
def choices_of_earlier_microbatches_counted(setup: Setup) -> None:
    """Bug: the load-balancing loss uses expert counts accumulated since the step began, not for one microbatch."""
    inner, kept = setup.full_counts, list[torch.Tensor]()

    def full_counts(model: nn.Module, counts: Counts, batch: Batch, index: int) -> Counts:
        found = inner(model, counts, batch, index)
        kept[:] = [before + each for before, each in zip(kept, found, strict=True)] if kept else list(found)
        return list(kept)

    setup.full_counts = full_counts
    setup.before_step.append(lambda _optimizer, _index: kept.clear())
