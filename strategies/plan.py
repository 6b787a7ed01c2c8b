"""Tensor-parallel plans, drawn layer by layer from those that are legal after the layers before."""

from __future__ import annotations

from dataclasses import replace

from hypothesis.strategies import DrawFn

from equivcheck.parallelisms.tensor_parallel.plans import legal_plans
from equivcheck.scenario import ActivationSharding, LayerPlan, Layout, TensorParallel, Training
from equivcheck.scenario.mesh import TP
from equivcheck.strategies.chance import below

_NO_PLAN = TensorParallel().plan


def needs_plan(layout: Layout) -> bool:
    """Whether a layout has tensor parallelism with the default plan, which stands for none."""
    return any(parallelism.plan == _NO_PLAN for parallelism in layout.of(TensorParallel))


def with_idle_plan(layout: Layout, training: Training) -> Layout:
    """The layout with a plan that fits any training: every layer whole on every rank."""
    return _with_plan(layout, _NO_PLAN * len(training.model.layers))


def with_drawn_plan(draw: DrawFn, layout: Layout, training: Training, *, beyond: bool) -> Layout:
    """The layout with a plan that is legal for the training."""
    plan: list[LayerPlan] = []
    sharding, ranks = ActivationSharding.WHOLE, layout.mesh.size(TP)
    rows = tuple(rows // layout.num_data_ranks for rows in training.data.microbatches)
    for index in range(len(training.model.layers)):
        legal = legal_plans(training.model, index, sharding, ranks, rows, beyond=beyond)
        plan.append(legal[draw(below(len(legal)))])
        sharding = plan[-1].output
    return _with_plan(layout, tuple(plan))


def _with_plan(layout: Layout, plan: tuple[LayerPlan, ...]) -> Layout:
    parallelisms = tuple(
        replace(parallelism, plan=plan) if isinstance(parallelism, TensorParallel) else parallelism
        for parallelism in layout.parallelisms
    )
    return replace(layout, parallelisms=parallelisms)
