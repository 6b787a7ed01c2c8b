"""Layers in a tensor-parallel plan, in scenarios and setups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from equivcheck.layouts.base.plan.rules import LayerSite, places
from equivcheck.mutants.needs import layouts_with
from equivcheck.mutants.rank import layout_of
from equivcheck.scenario import LayerPlan, Layout, Model, Scenario, TensorParallel
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.linear.module import Block
from equivcheck.training.setup import Setup

TENSOR_PARALLEL = layouts_with(TensorParallel.tag)
"""Layouts with tensor parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A layer with its entry in the tensor-parallel plan."""

    site: LayerSite
    """The layer, with the placement of its input."""
    plan: LayerPlan
    """How the layer is split, with the placement of its output."""


Chosen = Callable[[Planned], bool]


def _planned(model: Model, layout: Layout) -> tuple[Planned, ...]:
    """Return the layers split over several ranks; empty unless all layers are linear."""
    plans = layout.of(TensorParallel)
    tp = layout.mesh.size(TP)
    if not plans or tp == 1 or not model.linears:
        return ()
    found = places(model, plans[0], tp, ())
    return tuple(Planned(site=site, plan=entry) for site, entry in zip(found, plans[0].plan, strict=True))


def has_layer(chosen: Chosen) -> Callable[[Scenario], bool]:
    """Return a condition for scenarios: `chosen` accepts some layer in the tensor-parallel plan."""
    return lambda scenario: any(map(chosen, _planned(scenario.training.model, scenario.layout)))


def blocks(setup: Setup, chosen: Chosen) -> Iterator[tuple[Block, Planned]]:
    """Yield layers' modules with their entries in the tensor-parallel plan. `chosen` selects layers.

    Yields nothing without tensor parallelism over several ranks.
    """
    planned = _planned(setup.training.model, layout_of(setup))
    layers = setup.model.get_submodule("layers").children() if planned else ()
    for module, layer in zip(layers, planned, strict=True):
        # Pipeline ranks have no block for layers of other ranks' stages.
        for block in (each for each in module.modules() if isinstance(each, Block) and chosen(layer)):
            yield block, layer
