"""Strategies for scenarios: trainings on layouts that support them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import and_

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.layouts.base.limits.repairs import with_summed_squares
from equivcheck.layouts.composition.fitting import fit_training, multiply_rows, row_multiple
from equivcheck.layouts.composition.limits import runs_sequences
from equivcheck.scenario import FSDP2, Execution, Layout, Pipeline, Scenario, Training
from equivcheck.scenario.mesh import MAX_RANKS
from equivcheck.strategies.chance import EVENLY, RARELY, SEEDS, SOMETIMES
from equivcheck.strategies.layout import executions, layouts
from equivcheck.strategies.plan import needs_plan, with_drawn_plan, with_idle_plan, with_usual_bases
from equivcheck.strategies.resume import may_resume, with_drawn_resume
from equivcheck.strategies.stages import (
    needs_stages,
    with_a_layer_for_each_stage,
    with_drawn_boundaries,
    with_drawn_schedule,
    with_usual_rows,
    with_usual_workarounds,
)
from equivcheck.strategies.training import trainings

_EXECUTIONS = executions()
_TRAININGS = trainings(tokens=st.sampled_from((False, False, False, True, True)))
"""Trainings, about a third on sequences, because every layout runs sequences."""
_SEQUENCES = trainings(tokens=st.just(True))
_PLAIN_TRAININGS = trainings(tokens=st.just(False))
_SUMMED = st.sampled_from((False,) + (True,) * 5)
_RESUMES = st.builds(and_, RARELY, RARELY)
MORE_RESUMES = st.builds(and_, SOMETIMES, SOMETIMES)
"""Strategy for resuming in one of nine scenarios instead of one of 36.
It is for long runs that must reach faults that only resuming shows."""


@st.composite
def scenarios(  # noqa: PLR0913 - a strategy for each part, all by keyword
    draw: DrawFn,
    *,
    trainings: SearchStrategy[Training] | None = None,
    layouts: SearchStrategy[Layout] | Sequence[str] | None = None,
    max_ranks: int = MAX_RANKS,
    executions: SearchStrategy[Execution] = _EXECUTIONS,
    resumes: SearchStrategy[bool] = _RESUMES,
) -> Scenario:
    """Draw scenarios that layouts support.

    `layouts` is a strategy, tags such as `("ddp", "fsdp2")`, or None for every registered layout; `max_ranks` and `executions`
    apply to the latter two. The training is adapted to its layout: rows that the data ranks cannot share are multiplied by their
    number, and unsupported options are dropped. Default plans are replaced by legal tensor-parallel plans, default pipelines by a
    schedule and stages. If `resumes` draws True and the scenario allows it, the first steps run under another layout.
    """
    layout = _chosen(draw, layouts, max_ranks, executions)
    scenario = _scenario(draw, layout, _training(draw, trainings, layout), beyond=False)
    if trainings is None and needs_stages(layout):
        scenario = with_usual_workarounds(draw, scenario)
    return with_drawn_resume(draw, scenario) if may_resume(scenario) and draw(resumes) else scenario


@st.composite
def frontier(
    draw: DrawFn,
    *,
    trainings: SearchStrategy[Training] | None = None,
    layouts: SearchStrategy[Layout] | Sequence[str] | None = None,
    max_ranks: int = MAX_RANKS,
) -> Scenario:
    """Draw scenarios as `scenarios` does, and some that torch is known not to support, for ``check(..., beyond=True)``.

    Such a run should be correct or raise on every rank. It must not be silently wrong, and must not hang.
    """
    layout = _chosen(draw, layouts, max_ranks, _EXECUTIONS)
    return _scenario(draw, layout, _training(draw, trainings, layout), beyond=True)


def _chosen(
    draw: DrawFn,
    layouts: SearchStrategy[Layout] | Sequence[str] | None,
    max_ranks: int,
    executions: SearchStrategy[Execution],
) -> Layout:
    return draw(layouts if isinstance(layouts, SearchStrategy) else _layouts(layouts and tuple(layouts), max_ranks, executions))


def _scenario(draw: DrawFn, layout: Layout, training: Training, *, beyond: bool) -> Scenario:
    staged = needs_stages(layout)
    if staged:
        layout = with_drawn_schedule(draw, layout)
    # Often rows for all ranks, because sequence parallelism shards rows over tensor-parallel ranks, too.
    only_data_ranks = layout.has(Pipeline) or layout.num_data_ranks == layout.mesh.num_ranks or draw(EVENLY)
    training = multiply_rows(training, row_multiple(layout, over_all_ranks=not only_data_ranks))
    if staged:
        # The plan is drawn later. Until then, an idle plan has an entry for each layer, so stages need their layers first.
        training = with_a_layer_for_each_stage(training, layout)
        training = fit_training(training, with_idle_plan(layout, training), beyond=beyond)
        layout = with_drawn_boundaries(draw, layout, len(training.model.layers))
    if needs_plan(layout):
        training = fit_training(training, with_idle_plan(layout, training), beyond=beyond)
        layout = with_drawn_plan(draw, layout, training, beyond=beyond)
    training = fit_training(training, layout, beyond=beyond)
    return Scenario(training=training, layout=layout, schedule_seed=draw(SEEDS))


def _training(draw: DrawFn, trainings: SearchStrategy[Training] | None, layout: Layout) -> Training:
    """Draw a training. For DTensor activations, losses with known issues are usually replaced, unless trainings are given.

    DTensor computes the gradient of a mean of squared errors incorrectly (`dtensor_mse_loss_mean`), and `fully_shard` multiplies
    gradients of linear losses (`fsdp2_multiplies_replicated_gradients`). A check that ends as KNOWN proves nothing else about its
    scenario, and a quarter would. Some losses stay, because torch may fix the issues.
    """
    if trainings is not None:
        return draw(trainings)
    training = with_usual_rows(draw, draw(_trainings_for(layout)), layout)
    training = with_usual_bases(draw, training, layout)
    if any(parallelism.shards_positions for parallelism in layout.parallelisms):
        return training
    by_propagation = layout.propagates_placements
    # Drawn for every loss, because a mean of squared errors, the plainest, must take no more choices than others.
    if not (by_propagation and draw(_SUMMED)):
        return training
    return with_summed_squares(training, also_linear=layout.has(FSDP2))


def _trainings_for(layout: Layout) -> SearchStrategy[Training]:
    if any(parallelism.shards_positions for parallelism in layout.parallelisms):
        return _SEQUENCES
    return _TRAININGS if runs_sequences(layout) else _PLAIN_TRAININGS


@cache
def _layouts(tags: tuple[str, ...] | None, max_ranks: int, executions: SearchStrategy[Execution]) -> SearchStrategy[Layout]:
    return layouts(tags=tags, max_ranks=max_ranks, executions=executions)
