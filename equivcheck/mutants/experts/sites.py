"""What mutants find of experts, in a scenario and on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.mutants.needs import EVERYWHERE, is_eager
from equivcheck.scenario import SPMD, Experts, Scenario
from equivcheck.training.layers.experts.module import ExpertsModule
from equivcheck.training.setup import Setup

Chosen = Callable[[Experts], bool]

ONE_RANK = "one rank routes as well"
ROUTED = tuple(name for name in EVERYWHERE if name != SPMD.tag)
"""Layouts in which what a router gives are plain tensors."""


def any_experts(_layer: Experts) -> bool:
    """Whatever they are."""
    return True


def has_experts(chosen: Chosen = any_experts) -> Callable[[Scenario], bool]:
    """Whether hooks are called, and a scenario has such a layer of experts."""
    return lambda scenario: is_eager(scenario) and any(map(chosen, experts_in(scenario)))


def experts_in(scenario: Scenario) -> Iterator[Experts]:
    """The layers of experts of a scenario."""
    return (layer for layer in scenario.training.model.layers if isinstance(layer, Experts))


def experts_of(setup: Setup, chosen: Chosen = any_experts) -> Iterator[ExpertsModule]:
    """The modules of such layers that a rank has."""
    return (module for module in setup.model.modules() if isinstance(module, ExpertsModule) and chosen(module.layer))
