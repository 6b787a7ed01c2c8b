"""Tensor-parallel plans, drawn layer by layer from the legal plans after the previous layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.limits.repairs import with_trained_bases
from equivcheck.layouts.base.partition import is_last_shard_empty
from equivcheck.layouts.base.plan.rules import TIED_HALVES, UNFREEZES, LayerSite, legal_plans
from equivcheck.scenario import (
    ActivationSharding,
    CrossEntropy,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Pipeline,
    PlannedParallelism,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.scenario.mesh import TP
from equivcheck.strategies.chance import EVENLY, indices_below
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.registry import layer_kind

_WHOLE, _OUTSIDE = LayerPlan(), LayerPlan(split=Split.NOT_IN_PLAN)
_NO_PLAN = (_WHOLE,)
SPLITS = tuple(TIED_HALVES)
"""Ways to shard an embedding or a head, simplest first."""
_USUALLY = st.sampled_from((True,) * 5 + (False,))


def needs_plan(layout: Layout) -> bool:
    """Whether the layout has tensor parallelism whose plan must still be drawn.

    The default plan marks it. Under a pipeline, repairs repeat the default entry until each stage has one.
    """
    plans = [parallelism.plan for parallelism in layout.of(PlannedParallelism)]
    return any(set(plan) == {_WHOLE} if layout.has(Pipeline) else plan == _NO_PLAN for plan in plans)


def with_usual_bases(draw: DrawFn, training: Training, layout: Layout) -> Training:
    """If tensor parallelism would unfreeze the base weights of adapters, usually train them.

    Parallelisms that replace DTensors by local tensors do so (`local_tensors_unfreeze`), and `parallelize_module` does in older
    versions (`tensor_parallel_unfreezes`). Nearly every check with a frozen base would end as KNOWN.
    """
    unfreezes = layout.has(TensorParallel) and (not keeps_dtensors(layout) or is_torch_in(UNFREEZES))
    if not (unfreezes and any(layer.frozen_base for layer in training.model.layers) and draw(_USUALLY)):
        return training
    return with_trained_bases(training)


def with_idle_plan(layout: Layout, training: Training) -> Layout:
    """Give the layout a tensor-parallel plan that fits any training.

    Each layer is replicated, or outside the plan if none of its linears is known.
    """
    layers = training.model.layers
    return _with_plan(layout, tuple(_WHOLE if layer_kind(layer).linears(layer) else _OUTSIDE for layer in layers))


def with_drawn_plan(draw: DrawFn, layout: Layout, training: Training, *, beyond: bool, repaired: bool = True) -> Layout:
    """Give the layout a drawn tensor-parallel plan that is legal for the training.

    With `repaired`, the plan may break rules whose repair changes a single layer. With `beyond`, it may break rules that torch
    enforces.
    """
    model, ranks, plan = training.model, layout.mesh.size(TP), []
    is_local = layout.has(LocalTensorParallel)
    source = _drawn_source(draw, training, ranks, empty=is_local)
    has_head = model.head is not None and not (model.head.tied and source is Split.NOT_IN_PLAN)
    ends = (ActivationSharding.REPLICATED, ActivationSharding.ROWS) if has_head else (ActivationSharding.REPLICATED,)
    rows = layout.rows_of_forwards(training.data.microbatches)
    place = LayerSite(model=model, index=0, input=ActivationSharding.REPLICATED, tp=ranks, rows=rows, ends=ends)
    among = partial(legal_plans, beyond=beyond, repaired=repaired, local=is_local)
    source_output = _drawn_source_output(draw, place, source, among)
    place = replace(place, input=source_output)
    for index in range(len(model.layers)):
        legal = among(replace(place, index=index))
        plan.append(legal[draw(indices_below(len(legal)))])
        place = replace(place, input=plan[-1].output)
    head = _drawn_head(draw, training, source, last=place.input)
    in_parts = head is Split.COLWISE and isinstance(training.loss, CrossEntropy) and draw(EVENLY)
    return _with_plan(layout, tuple(plan), source=source, source_output=source_output, head=head, loss_parallel=in_parts)


def _drawn_source_output(
    draw: DrawFn, place: LayerSite, source: Split, among: Callable[[LayerSite], tuple[LayerPlan, ...]]
) -> ActivationSharding:
    """Draw an output sharded by positions in half of all cases, if the layers accept that."""
    by_rows = replace(place, input=ActivationSharding.ROWS)
    if source is Split.NOT_IN_PLAN or not among(by_rows) or draw(EVENLY):
        return ActivationSharding.REPLICATED
    return ActivationSharding.ROWS


def _drawn_source(draw: DrawFn, training: Training, ranks: int, *, empty: bool) -> Split:
    """Draw a source sharded by tokens only if each rank gets some, unless ranks may be `empty`."""
    source = training.model.source
    if source is None:
        return Split.NOT_IN_PLAN
    splits = tuple(
        split for split in SPLITS if split is not Split.ROWWISE or empty or not is_last_shard_empty(source.vocabulary, ranks)
    )
    return splits[draw(indices_below(len(splits)))]


def _drawn_head(draw: DrawFn, training: Training, source: Split, *, last: ActivationSharding) -> Split:
    head = training.model.head
    if head is None:
        return Split.NOT_IN_PLAN
    splits = (
        SPLITS if last is ActivationSharding.REPLICATED else tuple(split for split in SPLITS if split is not Split.NOT_IN_PLAN)
    )
    return TIED_HALVES[source] if head.tied else splits[draw(indices_below(len(splits)))]


def _with_plan(layout: Layout, plan: tuple[LayerPlan, ...], **others: Any) -> Layout:
    parallelisms = tuple(
        replace(parallelism, plan=plan, **others) if isinstance(parallelism, PlannedParallelism) else parallelism
        for parallelism in layout.parallelisms
    )
    return replace(layout, parallelisms=parallelisms)
