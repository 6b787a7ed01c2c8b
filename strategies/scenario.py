"""Scenarios: trainings that a layout declares to support, on that layout."""

from __future__ import annotations

from dataclasses import replace

from hypothesis.strategies import DrawFn, SearchStrategy, composite

from equivcheck.layouts.plans import legal_plans
from equivcheck.layouts.registry import mended, unsupported
from equivcheck.scenario import Data, LayerPlan, Layout, Scenario, Spread, TensorParallel, Training
from equivcheck.scenario.data import MAX_ROWS
from equivcheck.scenario.mesh import MAX_RANKS, TP
from equivcheck.strategies.chance import SEEDS, SOMETIMES, below
from equivcheck.strategies.layout import layouts
from equivcheck.strategies.training import trainings


@composite
def scenarios(
    draw: DrawFn,
    *,
    trainings: SearchStrategy[Training] = trainings(),
    layouts: SearchStrategy[Layout] | tuple[str, ...] | None = None,
    max_ranks: int = MAX_RANKS,
) -> Scenario:
    """Scenarios within what layouts declare to support, simplest on one rank.

    `layouts` is a strategy, tags (`("ddp", "fsdp2")`), or None for every registered layout; `max_ranks` goes with the latter two. A
    training is fitted to its layout: rows that its data ranks cannot split are taken as those of one rank, and what the layout
    cannot run is left out. A tensor-parallel plan that does not fit, or says nothing, is drawn.
    """
    layout = draw(_layouts(layouts, max_ranks))
    training = draw(trainings)
    training = mended(replace(training, data=_split_over(draw, training.data, layout)), _without_plan(layout))
    return Scenario(training=training, layout=_with_plan(draw, training, layout), schedule_seed=draw(SEEDS))


_named_layouts = layouts


def _layouts(given: SearchStrategy[Layout] | tuple[str, ...] | None, max_ranks: int) -> SearchStrategy[Layout]:
    return given if isinstance(given, SearchStrategy) else _named_layouts(tags=given, max_ranks=max_ranks)
