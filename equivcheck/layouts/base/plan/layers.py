"""How each layer of a model is shared out under any layout, and in how many parts its sequences come to it."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.layouts.base.plan.rules import LayerSite, fits, places
from equivcheck.scenario import ActivationSharding, LayerPlan, Layout, Model, PlannedParallelism, Split
from equivcheck.scenario.mesh import TP

_OUTSIDE = LayerPlan(split=Split.OUTSIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """A layer and what a plan does to it."""

    site: LayerSite
    """The layer, and how its input lies; over one rank, where there is no plan."""
    plan: LayerPlan
    """How it is shared out; outside the plan, where there is none."""

    @property
    def num_parts(self) -> int:
        """Parts in which ranks have the positions of what comes to it; 1 where each has all, or rows are no sequences."""
        is_cut = self.site.input is ActivationSharding.ROWS and self.site.model.length is not None
        return self.site.tp if is_cut else 1

    @property
    def part_length(self) -> int:
        """Positions of each part, the last of which may be shorter."""
        return -(-(self.site.model.length or 1) // self.num_parts)


def plan_over_ranks(layout: Layout) -> PlannedParallelism | None:
    """The plan of a layout that shares layers out over several ranks."""
    return next((each for each in layout.of(PlannedParallelism) if layout.mesh.size(TP) > 1), None)


def planned_layers(model: Model, layout: Layout) -> tuple[PlannedLayer, ...]:
    """Each layer of a model, in order."""
    plan, whole = plan_over_ranks(layout), ActivationSharding.WHOLE
    if plan is None or not fits(model, plan.plan):
        sites = (LayerSite(model=model, index=index, input=whole, tp=1, rows=()) for index in range(len(model.layers)))
        return tuple(PlannedLayer(site=site, plan=_OUTSIDE) for site in sites)
    found = places(model, plan, layout.mesh.size(TP), ())
    return tuple(PlannedLayer(site=site, plan=entry) for site, entry in zip(found, plan.plan, strict=True))
