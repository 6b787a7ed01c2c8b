"""Tensor-parallel plans, drawn layer by layer from those that are legal after the layers before."""

from __future__ import annotations

from dataclasses import replace

from hypothesis.strategies import DrawFn

from equivcheck.layouts.partition import leaves_nothing
from equivcheck.parallelisms.tensor_parallel.plans import TIED_HALVES, legal_plans
from equivcheck.scenario import ActivationSharding, LayerPlan, Layout, Split, TensorParallel, Training
from equivcheck.scenario.mesh import TP
from equivcheck.strategies.chance import below

_NO_PLAN = TensorParallel().plan
SPLITS = tuple(TIED_HALVES)
"""How ranks share out an embedding or a head, simplest first."""


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
    source = _drawn_source(draw, training, ranks, beyond=beyond)
    return _with_plan(layout, tuple(plan), source=source, head=_drawn_head(draw, training, source))


def _drawn_source(draw: DrawFn, training: Training, ranks: int, *, beyond: bool) -> Split:
    source = training.model.source
    if source is None:
        return Split.OUTSIDE
    every_rank_has_tokens = beyond or not leaves_nothing(source.vocabulary, ranks)
    splits = SPLITS if every_rank_has_tokens else tuple(split for split in SPLITS if split is not Split.ROW)
    return splits[draw(below(len(splits)))]


def _drawn_head(draw: DrawFn, training: Training, source: Split) -> Split:
    head = training.model.head
    if head is None:
        return Split.OUTSIDE
    return TIED_HALVES[source] if head.tied else SPLITS[draw(below(len(SPLITS)))]


def _with_plan(
    layout: Layout, plan: tuple[LayerPlan, ...], *, source: Split = Split.OUTSIDE, head: Split = Split.OUTSIDE
) -> Layout:
    parallelisms = tuple(
        replace(parallelism, plan=plan, source=source, head=head) if isinstance(parallelism, TensorParallel) else parallelism
        for parallelism in layout.parallelisms
    )
    return replace(layout, parallelisms=parallelisms)
