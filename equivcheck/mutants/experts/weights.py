"""Expert outputs weighted wrongly, or routing weights that get no gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from equivcheck.mutants.experts.sites import PLAIN_ROUTERS, Chosen, any_experts, chooses_two, experts_of, has_experts
from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Experts, ScoreFunction
from equivcheck.training.layers.experts.module import Router
from equivcheck.training.setup import Setup

Routed = tuple[torch.Tensor, torch.Tensor]
"""Chosen experts (bool) and their weights, both (..., experts)."""
Change = Callable[[Router, torch.Tensor, Routed], Routed]
"""Function that changes a router's output, given the router, its input and its output."""


def reroute(setup: Setup, change: Change, chosen: Chosen = any_experts) -> None:
    """Let `change` replace the routers' outputs. `chosen` selects expert layers."""
    for module in experts_of(setup, chosen):
        module.router.forward = partial(_changed, module.router, module.router.forward, change)  # type: ignore[method-assign]


def _changed(router: Router, route: Callable[[torch.Tensor], Routed], change: Change, inputs: torch.Tensor) -> Routed:
    return change(router, inputs, route(inputs))


def scores_of(router: Router, inputs: torch.Tensor) -> torch.Tensor:
    """Compute a router's scores again. `inputs` have shape (..., features), and scores (..., experts)."""
    logits = functional.linear(inputs, router.weight)
    return logits.softmax(-1) if router.layer.scores is ScoreFunction.SOFTMAX else logits.sigmoid()


def _normalises(layer: Experts) -> bool:
    return layer.normalised


def _normalises_some(layer: Experts) -> bool:
    """Whether the chosen scores' sum differs from the sum over all scores."""
    return layer.normalised and layer.num_experts > layer.top_k


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(), causes=(Cause.ROUTER_WEIGHTS,), minimum=ONE_RANK)
def router_weights_applied_twice(setup: Setup) -> None:
    """Bug: routing weights are applied twice."""
    reroute(setup, lambda _router, _inputs, routed: (routed[0], routed[1].square()))


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(), causes=(Cause.ROUTER_WEIGHTS,), minimum=ONE_RANK)
def router_weights_not_applied(setup: Setup) -> None:
    """Bug: routing weights are not applied."""
    reroute(setup, lambda _router, _inputs, routed: (routed[0], routed[0] + routed[1] * 0))


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(chooses_two), causes=(Cause.ROUTER_WEIGHTS,), minimum=ONE_RANK)
def router_weights_swapped(setup: Setup) -> None:
    """Bug: the two chosen experts' weights are swapped."""

    def swap_weights(_router: Router, _inputs: torch.Tensor, routed: Routed) -> Routed:
        chosen, weights = routed
        return chosen, (weights.sum(-1, keepdim=True) - weights) * chosen

    reroute(setup, swap_weights, chooses_two)


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(_normalises_some), causes=(Cause.ROUTER_WEIGHTS,), minimum=ONE_RANK)
def router_weights_not_normalised(setup: Setup) -> None:
    """Bug: routing weights are not normalised."""

    def use_raw_scores(router: Router, inputs: torch.Tensor, routed: Routed) -> Routed:
        return routed[0], scores_of(router, inputs) * routed[0]

    reroute(setup, use_raw_scores, _normalises)


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(_normalises_some), causes=(Cause.ROUTER_WEIGHTS,), minimum=ONE_RANK)
def router_weights_normalised_before_choice(setup: Setup) -> None:
    """Bug: routing weights are normalised over all experts instead of the chosen experts."""

    def normalise_over_all(router: Router, inputs: torch.Tensor, routed: Routed) -> Routed:
        scores = scores_of(router, inputs)
        return routed[0], scores * routed[0] / scores.sum(-1, keepdim=True)

    reroute(setup, normalise_over_all, _normalises)


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(), causes=(Cause.ROUTER_WEIGHTS,), minimum=ONE_RANK)
def router_weighs_other_side(setup: Setup) -> None:
    """Bug: routing weights multiply the experts' input instead of their output, or vice versa."""
    for module in experts_of(setup):
        module.layer = module.layer.with_fields(weighs_input=not module.layer.weighs_input)


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(), causes=(Cause.EXPERT_GRADIENT, Cause.GRADIENT_LOST), minimum=ONE_RANK)
def router_scores_detached(setup: Setup) -> None:
    """Bug: routing weights are detached, so they have no gradient."""
    reroute(setup, lambda _router, _inputs, routed: (routed[0], routed[1].detach() + routed[1] * 0))


@fault(layouts=PLAIN_ROUTERS, applies=has_experts(), causes=(Cause.EXPERT_GRADIENT,), minimum=ONE_RANK)
def experts_input_detached(setup: Setup) -> None:
    """Bug: the experts' input is detached, as if a dispatch without backward had sent it."""
    for module in experts_of(setup):
        for name in ("routed", "dispatched"):
            setattr(module, name, partial(_detached, getattr(module, name)))


def _detached(compute: Callable[..., torch.Tensor], values: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
    return compute(values.detach(), *routed)
