"""Each layer's entry in a plan, under any layout, and each rank's part of the sequence positions."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.layouts.base.plan.rules import LayerSite, fits, places
from equivcheck.scenario import ActivationSharding, LayerPlan, Layout, Model, PlannedParallelism, Split
from equivcheck.scenario.mesh import TP

_OUTSIDE = LayerPlan(split=Split.NOT_IN_PLAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """A layer with its entry in the tensor-parallel plan."""

    site: LayerSite
    """The layer and its input's placement. Without a plan, the site counts as on one rank."""
    plan: LayerPlan
    """How the layer is split. Without a plan, the layer counts as not in the plan."""

    @property
    def num_parts(self) -> int:
        """Number of shards into which the input's positions are split.

        1 if each rank has all positions, or if rows are not sequences.
        """
        is_cut = self.site.input is ActivationSharding.ROWS and self.site.model.length is not None
        return self.site.tp if is_cut else 1

    @property
    def part_length(self) -> int:
        """Number of positions in each shard of the layer's input. The last shard may be shorter."""
        return -(-(self.site.model.length or 1) // self.num_parts)


def plan_over_ranks(layout: Layout) -> PlannedParallelism | None:
    """Return the layout's tensor parallelism. None if there is none, or if its axis has one rank."""
    return next((each for each in layout.of(PlannedParallelism) if layout.mesh.size(TP) > 1), None)


def planned_layers(model: Model, layout: Layout) -> tuple[PlannedLayer, ...]:
    """Return all layers with their plan entries, in order."""
    plan, whole = plan_over_ranks(layout), ActivationSharding.REPLICATED
    if plan is None or not fits(model, plan.plan):
        sites = (LayerSite(model=model, index=index, input=whole, tp=1, rows=()) for index in range(len(model.layers)))
        return tuple(PlannedLayer(site=site, plan=_OUTSIDE) for site in sites)
    found = places(model, plan, layout.mesh.size(TP), ())
    return tuple(PlannedLayer(site=site, plan=entry) for site, entry in zip(found, plan.plan, strict=True))
