"""Which plans of tensor parallelism can run for which model.

Activations travel between layers as local tensors, as `parallelize_module` leaves them by default. A local tensor does
not carry the size of the whole, so what is cut between layers must be cut evenly; inside a layer torch cuts unevenly too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from equivcheck.layouts.limits.repairs import all_multiples, each_layer, with_num_layers, with_rows, with_widths
from equivcheck.layouts.partition import leaves_nothing
from equivcheck.scenario import ActivationSharding, Layer, LayerPlan, Layout, Model, ShapeOp, Split, TensorParallel, Training

ALL_PLANS: tuple[LayerPlan, ...] = tuple(
    LayerPlan(split=split, output=output)
    for split, output in product(Split, ActivationSharding)
    if not (split is Split.REPLICATED and output is ActivationSharding.FEATURES)
    and (split is not Split.OUTSIDE or output is ActivationSharding.WHOLE)
)
"""Every plan of a layer, simplest first."""

UNFREEZES = "<2.11"
"""Versions in which frozen parameters that tensor parallelism cuts get gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSite:
    """A layer and how its input comes to it."""

    model: Model
    """The model."""
    index: int
    """Which layer."""
    input: ActivationSharding
    """How the layer before left it."""
    tp: int
    """Ranks along the tensor-parallel axis."""
    rows: tuple[int, ...]
    """Rows of each microbatch on these ranks."""

    @property
    def layer(self) -> Layer:
        """The layer."""
        return self.model.linears[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRule:
    """Something that a plan may not do at a place."""

    reason: str
    """One sentence for people."""
    broken: Callable[[LayerSite, LayerPlan], bool]
    """Whether the plan does it there."""
    repair: Callable[[Training, Layout, LayerSite], Training]
    """The nearest training for which it is allowed."""
    upstream: bool = False
    """As for a `Limit`."""


def _with_layer(training: Training, index: int, **changes: bool | None) -> Training:
    return each_layer(training, lambda at, layer: layer.having(**changes) if at == index else layer)


RULES: tuple[PlanRule, ...] = (
    PlanRule(
        reason="tensor parallelism: a norm needs all features of a row, but its layer finds its input cut by features",
        broken=lambda place, _plan: place.layer.norm is not None and place.input is ActivationSharding.FEATURES,
        repair=lambda training, _layout, place: _with_layer(training, place.index, norm=None),
    ),
    PlanRule(
        reason="tensor parallelism: a residual adds a layer's input to its output, but the plan spreads them differently",
        broken=lambda place, plan: place.layer.residual and plan.output is not place.input,
        repair=lambda training, _layout, place: _with_layer(training, place.index, residual=False),
    ),
    PlanRule(
        reason="tensor parallelism: a layer counts features that its plan cuts, and a local tensor does not tell where it starts",
        broken=lambda place, plan: place.layer.shape_op is ShapeOp.ARANGE and plan.output is ActivationSharding.FEATURES,
        repair=lambda training, _layout, place: _with_layer(training, place.index, shape_op=None),
    ),
    PlanRule(
        reason="tensor parallelism: rows cut between layers must be a multiple of the ranks, as local tensors do not tell how "
        "they were cut",
        broken=lambda place, plan: plan.output is ActivationSharding.ROWS and not all_multiples(place.rows, place.tp),
        repair=lambda training, layout, place: with_rows(training, layout.num_data_ranks * place.tp),
        upstream=True,
    ),
    PlanRule(
        reason="tensor parallelism: features cut between layers must be a multiple of the ranks, as local tensors do not tell "
        "how they were cut (pytorch#150336)",
        broken=lambda place, plan: plan.output is ActivationSharding.FEATURES and place.layer.width % place.tp != 0,
        repair=lambda training, _layout, place: with_widths(training, place.tp),
        upstream=True,
    ),
)
"""What a plan may not do at its place; rules about the whole plan are in `legal_plans` and in the layout's limits."""


def legal_plans(  # noqa: PLR0913 - what makes a place
    model: Model, index: int, input: ActivationSharding, tp: int, microbatches: tuple[int, ...], *, beyond: bool = False
) -> tuple[LayerPlan, ...]:
    """What can run for a layer whose input lies as `input`, such that the layers after it can run as well.

    `microbatches` are the rows of each microbatch in one tensor-parallel group. Empty only where no plan of the layers before
    leaves `input`. Rules that torch makes do not count with `beyond`.
    """
    place = LayerSite(model=model, index=index, input=input, tp=tp, rows=microbatches)
    return tuple(plan for plan in ALL_PLANS if not _breaks(place, plan, beyond) and _can_go_on(place, plan, beyond))


def _breaks(place: LayerSite, plan: LayerPlan, beyond: bool) -> bool:
    is_cut_off = plan.split is Split.OUTSIDE and place.input is not ActivationSharding.WHOLE
    return is_cut_off or any(rule.broken(place, plan) for rule in RULES if not (beyond and rule.upstream))


def _can_go_on(place: LayerSite, plan: LayerPlan, beyond: bool) -> bool:
    after = place.index + 1
    if after == len(place.model.layers):
        return plan.output is ActivationSharding.WHOLE
    following = replace(place, index=after, input=plan.output)
    return any(not _breaks(following, entry, beyond) and _can_go_on(following, entry, beyond) for entry in ALL_PLANS)


def places(model: Model, plan: tuple[LayerPlan, ...], tp: int, microbatches: tuple[int, ...]) -> tuple[LayerSite, ...]:
    """Where each entry of a plan of as many entries as layers would run."""
    inputs = (ActivationSharding.WHOLE, *(entry.output for entry in plan[:-1]))
    return tuple(
        LayerSite(model=model, index=index, input=sharding, tp=tp, rows=microbatches) for index, sharding in enumerate(inputs)
    )


def fits(model: Model, plan: tuple[LayerPlan, ...]) -> bool:
    """Whether a plan has one entry a layer."""
    return len(plan) == len(model.layers)


def fitted(training: Training, plan: tuple[LayerPlan, ...]) -> Training:
    """The training with as many layers as the plan has entries."""
    return with_num_layers(training, len(plan))


def is_outside(plan: tuple[LayerPlan, ...], layer: int | None) -> bool:
    """Whether a plan leaves the parameters of a layer plain tensors, as it does with those of the model itself (None)."""
    return layer is None or plan[layer].split is Split.OUTSIDE


def splits_weights(plan: tuple[LayerPlan, ...]) -> bool:
    """Whether a plan gives ranks different parts of some weight."""
    return any(entry.split in (Split.COLUMN, Split.ROW) for entry in plan)


def cuts(model: Model, plan: tuple[LayerPlan, ...]) -> Iterator[tuple[Layer, int]]:
    """Each layer that a plan of as many entries as layers cuts, and the size of the dim along which it does."""
    for index, (layer, entry) in enumerate(zip(model.linears, plan, strict=True)):
        if entry.split in (Split.COLUMN, Split.ROW):
            yield layer, layer.width if entry.split is Split.COLUMN else model.inputs(index)


def trained_cuts(model: Model, plan: tuple[LayerPlan, ...]) -> Iterator[int]:
    """The sizes of those of trained layers."""
    return (size for layer, size in cuts(model, plan) if not layer.frozen)


def has_pending_gradients(model: Model, plan: tuple[LayerPlan, ...]) -> bool:
    """Whether the gradient of some parameter comes out pending a sum: each rank has it whole, and has seen some of the rows."""
    inputs = (ActivationSharding.WHOLE, *(entry.output for entry in plan[:-1]))
    return any(
        sharding is ActivationSharding.ROWS and (layer.norm is not None or (entry.split is Split.REPLICATED and not layer.frozen))
        for layer, entry, sharding in zip(model.layers, plan, inputs, strict=True)
    )


def unfrozen_norms(model: Model, layout: Layout) -> set[int]:
    """The frozen layers whose norms `SequenceParallel`, which takes inputs that lie by rows, makes trainable."""
    plans = [parallelism.plan for parallelism in layout.of(TensorParallel)]
    return {
        index
        for plan in plans
        for index, (layer, before) in enumerate(zip(model.layers[1:], plan, strict=False), start=1)
        if layer.norm is not None and layer.frozen and before.output is ActivationSharding.ROWS
    }


def frozen_splits(model: Model, layout: Layout) -> set[int]:
    """The frozen layers whose linears are split by columns or rows."""
    plans = [parallelism.plan for parallelism in layout.of(TensorParallel)]
    return {
        index
        for plan in plans
        for index, (layer, entry) in enumerate(zip(model.layers, plan, strict=False))
        if layer.frozen and entry.split in (Split.COLUMN, Split.ROW)
    }


def layers_of_nothing(model: Model, plan: tuple[LayerPlan, ...], tp: int) -> list[bool]:
    """Of each layer, whether a plan of as many entries as layers leaves the last of the ranks no element of any parameter."""
    return [
        layer.norm is None
        and (
            (entry.split is Split.COLUMN and leaves_nothing(layer.width, tp))
            or (entry.split is Split.ROW and not layer.bias and leaves_nothing(model.inputs(index), tp))
        )
        for index, (layer, entry) in enumerate(zip(model.linears, plan, strict=True))
    ]
