"""Expert layers in scenarios and setups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.mutants.needs import EVERYWHERE, is_eager
from equivcheck.scenario import SPMD, Experts, Scenario
from equivcheck.training.layers.experts.module import ExpertsModule
from equivcheck.training.setup import Setup

Chosen = Callable[[Experts], bool]

PLAIN_ROUTERS = tuple(name for name in EVERYWHERE if name != SPMD.tag)
"""Layouts in which routers return plain tensors."""


def any_experts(_layer: Experts) -> bool:
    """Accept any expert layer."""
    return True


def chooses_two(layer: Experts) -> bool:
    """Whether each row chooses several experts."""
    return layer.top_k > 1


def has_experts(chosen: Chosen = any_experts) -> Callable[[Scenario], bool]:
    """Return a condition for scenarios: nothing is compiled or traced, and `chosen` accepts some expert layer."""
    return lambda scenario: is_eager(scenario) and any(map(chosen, experts_in(scenario)))


def experts_in(scenario: Scenario) -> Iterator[Experts]:
    """Yield the scenario's expert layers."""
    return (layer for layer in scenario.training.model.layers if isinstance(layer, Experts))


def experts_of(setup: Setup, chosen: Chosen = any_experts) -> Iterator[ExpertsModule]:
    """Yield the modules with experts on this rank that `chosen` accepts."""
    return (module for module in setup.model.modules() if isinstance(module, ExpertsModule) and chosen(module.layer))
