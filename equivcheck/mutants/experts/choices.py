"""Rows computed by wrong or too few experts, and faults in shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from equivcheck.mutants.experts.sites import PLAIN_ROUTERS, chooses_two, experts_of, has_experts
from equivcheck.mutants.experts.weights import Routed, reroute
from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, FSDP1, FSDP2, ExpertParallel, Experts, Replicate
from equivcheck.training.layers.experts.module import ExpertsModule, Router
from equivcheck.training.setup import Setup

BY_ROWS = (DDP.tag, Replicate.tag, FSDP1.tag, FSDP2.tag, ExpertParallel.tag)
"""Layouts in which a rank computes all its rows of a microbatch at once."""


def _shares_weighted(layer: Experts) -> bool:
    """Whether the layer has a shared expert and the routing weights do not add up to 1."""
    return layer.shared and not layer.normalised


def _shares_beside_two(layer: Experts) -> bool:
    return layer.shared and layer.top_k > 1


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(), causes=(Cause.EXPERT_CHOICE,), minimum=ONE_RANK)
def rows_given_to_next_expert(setup: Setup) -> None:
    """Bug: each row is computed by the expert after the chosen one, with the chosen one's weight."""
    reroute(setup, lambda _router, _inputs, routed: (routed[0].roll(1, -1), routed[1].roll(1, -1)))


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(chooses_two), causes=(Cause.EXPERT_CHOICE,), minimum=ONE_RANK)
def second_expert_left_out(setup: Setup) -> None:
    """Bug: the chosen expert with the lower score computes nothing."""

    def keep_best_expert(_router: Router, _inputs: torch.Tensor, routed: Routed) -> Routed:
        best = torch.zeros_like(routed[0]).scatter(-1, routed[1].detach().argmax(-1, keepdim=True), value=True)
        return best, routed[1] * best

    reroute(setup, keep_best_expert, chooses_two)


@fault(layouts=BY_ROWS, applies=has_experts(), causes=(Cause.EXPERT_CHOICE,), minimum=ONE_RANK)
def rows_beyond_capacity_dropped(setup: Setup) -> None:
    """Bug: rows over an expert's capacity are dropped on each rank."""

    def drop_beyond_capacity(router: Router, _inputs: torch.Tensor, routed: Routed) -> Routed:
        flat = routed[0].flatten(0, -2)
        capacity = math.ceil(len(flat) * router.layer.top_k / router.layer.num_experts)
        fits = (flat & (flat.cumsum(0) <= capacity)).view(routed[0].shape)
        return fits, routed[1] * fits

    reroute(setup, drop_beyond_capacity)


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(_shares_weighted), causes=(Cause.SHARED_EXPERT,), minimum=ONE_RANK)
def shared_expert_weighted(setup: Setup) -> None:
    """Bug: the shared expert's output is multiplied by the routing weights."""
    for module in experts_of(setup, _shares_weighted):
        _weigh_shared(module)


def _weigh_shared(module: ExpertsModule) -> None:
    sums: list[torch.Tensor] = []

    def keep(_router: object, _inputs: object, routed: Routed) -> None:
        sums[:] = [routed[1].sum(-1, keepdim=True)]

    assert module.shared is not None, "only layers with a shared expert are selected"
    module.router.register_forward_hook(keep)
    module.shared.register_forward_hook(lambda _module, _inputs, made: made * sums[0])


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(_shares_beside_two), causes=(Cause.SHARED_EXPERT,), minimum=ONE_RANK)
def shared_expert_added_for_each_choice(setup: Setup) -> None:
    """Bug: the shared expert's output is added once per chosen expert."""
    for module in experts_of(setup, _shares_beside_two):
        assert module.shared is not None, "only layers with a shared expert are selected"
        module.shared.register_forward_hook(_times(module.layer.top_k))


def _times(count: int) -> Callable[[object, object, torch.Tensor], torch.Tensor]:
    return lambda _module, _inputs, made: made * count
