"""Draw first steps under another layout, and resume the scenario from their checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import lcm

from hypothesis.strategies import DrawFn

from equivcheck.layouts.composition.fitting import fit_training, multiply_rows, row_multiple
from equivcheck.layouts.composition.limits import can_resume, repair_layout_for_resume
from equivcheck.layouts.composition.registry import BrokenLayout
from equivcheck.layouts.composition.resume_limits import flattenings
from equivcheck.layouts.parallelisms.pipeline.stages import num_stages
from equivcheck.scenario import Resume, Scenario
from equivcheck.scenario.data import USUAL_ROWS
from equivcheck.strategies.chance import indices_below
from equivcheck.strategies.layout import layouts
from equivcheck.strategies.plan import needs_plan, with_drawn_plan, with_idle_plan
from equivcheck.strategies.stages import needs_stages, with_drawn_boundaries, with_drawn_schedule

MAX_FIRST_RANKS = 4
"""Maximum ranks in the first layout."""
_FIRST_LAYOUTS = layouts(max_ranks=MAX_FIRST_RANKS)


def may_resume(scenario: Scenario) -> bool:
    """Whether the scenario's first steps can run under another layout, and the scenario can resume after them."""
    return scenario.training.steps > 1 and can_resume(scenario.layout)


def with_drawn_resume(draw: DrawFn, scenario: Scenario) -> Scenario:
    """Let the scenario run its first steps under another layout, and resume from a checkpoint.

    The scenario is unchanged if both layouts do not fit together: their rows have no common multiple, the first layout has more
    stages than layers, only one of them can load the optimizer state, or they need different trainings. For example,
    `loss_parallel` needs a loss over labels, which a pipeline that scales gradients cannot have.
    """
    training, layout = scenario.training, scenario.layout
    first = repair_layout_for_resume(draw(_FIRST_LAYOUTS))
    staged = needs_stages(first)
    if staged:
        # A schedule may change other options, such as the storage of experts.
        first = repair_layout_for_resume(with_drawn_schedule(draw, first))
    choices = flattenings(layout, first)
    multiple = lcm(*(row_multiple(each, over_all_ranks=True) for each in (layout, first)))
    if not choices or multiple > USUAL_ROWS or (staged and num_stages(first) > len(training.model.layers)):
        return scenario
    training = multiply_rows(training, multiple)
    if staged:
        first = with_drawn_boundaries(draw, first, len(training.model.layers))
    if needs_plan(first):
        training = fit_training(training, layout, with_idle_plan(first, training))
        first = with_drawn_plan(draw, first, training, beyond=False, repaired=False)
    resume = Resume(
        layout=first,
        steps=1 + draw(indices_below(training.steps - 1)),
        flatten_optimizer_state_dict=choices[draw(indices_below(len(choices)))],
    )
    with suppress(BrokenLayout):
        return replace(scenario, training=fit_training(training, layout, first), resume=resume)
    return scenario
