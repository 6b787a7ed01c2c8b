"""What mutants find of a token model: its layers with what a plan does to them, on a scenario and on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.layouts.base.plan.layers import PlannedLayer, planned_layers
from equivcheck.mutants.needs import is_eager
from equivcheck.scenario import Scenario
from equivcheck.training.layers.module import LayerModule
from equivcheck.training.setup import Setup

Chosen = Callable[[PlannedLayer], bool]


def has_layer(chosen: Chosen) -> Callable[[Scenario], bool]:
    """Whether hooks are called, and the layout of a scenario has such a layer."""
    return lambda scenario: is_eager(scenario) and any(map(chosen, planned_layers(scenario.training.model, scenario.layout)))


def layers_of(setup: Setup, chosen: Chosen) -> Iterator[tuple[LayerModule, PlannedLayer]]:
    """The modules of such layers that a rank has."""
    assert setup.layout is not None, "a mutant is planted into a rank"
    planned = planned_layers(setup.training.model, setup.layout)
    for layer, place in zip(setup.model.get_submodule("layers").children(), planned, strict=True):
        for module in layer.modules():
            if isinstance(module, LayerModule) and chosen(place):
                yield module, place
