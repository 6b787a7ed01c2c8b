"""First steps under another layout, from whose checkpoint a scenario resumes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import lcm

from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.composition.fitting import fitted_training, row_multiple, with_scaled_rows
from equivcheck.layouts.composition.limits import can_resume, resumable_layout
from equivcheck.layouts.composition.registry import BrokenLayout
from equivcheck.layouts.composition.resume_limits import flattenings
from equivcheck.layouts.parallelisms.pipeline.stages import num_stages
from equivcheck.scenario import Layout, Resume, Scenario
from equivcheck.scenario.data import USUAL_ROWS
from equivcheck.strategies.chance import below
from equivcheck.strategies.layout import layouts
from equivcheck.strategies.plan import needs_plan, with_drawn_plan, with_idle_plan
from equivcheck.strategies.stages import needs_stages, with_drawn_boundaries, with_drawn_schedule

MAX_FIRST_RANKS = 4
"""Most ranks of the layout that runs the first steps."""


def may_resume(scenario: Scenario) -> bool:
    """Whether there are first steps, and a layout that can take over."""
    return scenario.training.steps > 1 and can_resume(scenario.layout)


def with_drawn_resume(draw: DrawFn, scenario: Scenario) -> Scenario:
    """A scenario that may resume from a checkpoint, with its first steps under another layout.

    The scenario as it is where the two layouts do not go together: for rows that they cannot both share out, fewer layers than
    the first one has stages, optimizer state that only one could take, and a training that each wants otherwise, as of
    `loss_parallel` and a pipeline that scales gradients one takes the loss of labels alone and the other has none.
    """
    training, layout = scenario.training, scenario.layout
    first = resumable_layout(draw(_first_layouts()))
    staged = needs_stages(first)
    if staged:
        first = with_drawn_schedule(draw, first)
    choices = flattenings(layout, first)
    multiple = lcm(*(row_multiple(each, over_all_ranks=True) for each in (layout, first)))
    if not choices or multiple > USUAL_ROWS or (staged and num_stages(first) > len(training.model.layers)):
        return scenario
    training = with_scaled_rows(training, multiple)
    if staged:
        first = with_drawn_boundaries(draw, first, len(training.model.layers))
    if needs_plan(first):
        training = fitted_training(training, layout, with_idle_plan(first, training))
        first = with_drawn_plan(draw, first, training, beyond=False, repaired=False)
    resume = Resume(
        layout=first,
        steps=1 + draw(below(training.steps - 1)),
        flatten_optimizer_state_dict=choices[draw(below(len(choices)))],
    )
    with suppress(BrokenLayout):
        return replace(scenario, training=fitted_training(training, layout, first), resume=resume)
    return scenario


@cache
def _first_layouts() -> SearchStrategy[Layout]:
    return layouts(max_ranks=MAX_FIRST_RANKS)
