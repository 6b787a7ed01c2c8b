"""Layers with their tensor-parallel plan, in scenarios and setups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.layouts.base.plan.layers import PlannedLayer, planned_layers
from equivcheck.mutants.needs import is_eager
from equivcheck.mutants.rank import layout_of
from equivcheck.scenario import Scenario
from equivcheck.training.layers.module import LayerModule
from equivcheck.training.setup import Setup

Chosen = Callable[[PlannedLayer], bool]


def has_layer(chosen: Chosen) -> Callable[[Scenario], bool]:
    """Whether hooks run and the scenario has such a layer."""
    return lambda scenario: is_eager(scenario) and any(map(chosen, planned_layers(scenario.training.model, scenario.layout)))


def layers_of(setup: Setup, chosen: Chosen) -> Iterator[tuple[LayerModule, PlannedLayer]]:
    """The rank's modules for the chosen layers."""
    planned = planned_layers(setup.training.model, layout_of(setup))
    for layer, place in zip(setup.model.get_submodule("layers").children(), planned, strict=True):
        for module in layer.modules():
            if isinstance(module, LayerModule) and chosen(place):
                yield module, place
