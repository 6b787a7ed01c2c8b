"""Which plans of tensor parallelism can run for which model.

Activations travel between layers as local tensors, as `parallelize_module` leaves them by default. A local tensor does
not carry the size of the whole, so what is cut between layers must be cut evenly; inside a layer torch cuts unevenly too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from equivcheck.layouts.base.limits.repairs import (
    all_multiples,
    each_layer,
    shared_out,
    with_layer,
    with_num_layers,
    with_positions,
    with_rows,
    with_widths,
)
from equivcheck.layouts.base.partition import chunk_sizes, cut_dim, leaves_nothing
from equivcheck.scenario import (
    ActivationSharding,
    AnyLayer,
    LayerPlan,
    Layout,
    Model,
    PlannedParallelism,
    ShapeOp,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.training.layers.facts import ShardingChoice
from equivcheck.training.layers.parameters import Parameter, by_layer, parameters_of
from equivcheck.training.layers.registry import kind_of
from equivcheck.training.layers.token_facts import POSITIONS

ALL_PLANS: tuple[LayerPlan, ...] = tuple(
    LayerPlan(split=split, output=output)
    for split, output in product(Split, ActivationSharding)
    if not (split in (Split.REPLICATED, Split.WITHIN) and output is ActivationSharding.FEATURES)
    and (split is not Split.OUTSIDE or output is ActivationSharding.WHOLE)
)
"""Every plan of a layer, simplest first."""

TIED_HALVES: dict[Split, Split] = {
    Split.OUTSIDE: Split.OUTSIDE,
    Split.REPLICATED: Split.REPLICATED,
    Split.ROW: Split.COLUMN,
    Split.COLUMN: Split.ROW,
}
"""By how an embedding is shared out, how a head is that uses its weight."""

UNFREEZES = "<2.11"
"""Versions in which frozen parameters that tensor parallelism cuts get gradients."""


def choice_of(layer: AnyLayer, split: Split) -> ShardingChoice | None:
    """What a layer's kind says of a way to share it out; None where it cannot be."""
    return next((choice for choice in kind_of(layer).choices(layer) if choice.split is split), None)


def weights_of_addends(layer: AnyLayer, split: Split) -> int | None:
    """Weights that multiply addends of a layer's output, for each position; None where ranks compute no such addends."""
    choice = choice_of(layer, split)
    return None if choice is None else choice.weights


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
    ends: tuple[ActivationSharding, ...] = (ActivationSharding.WHOLE,)
    """How the last layer may leave its output."""

    @property
    def has_uneven_rows(self) -> bool:
        """Whether rows, or positions where rows are sequences, would be cut into unequal parts."""
        return not all_multiples(self.rows if self.model.length is None else (self.model.length,), self.tp)

    @property
    def layer(self) -> AnyLayer:
        """The layer."""
        return self.model.layers[self.index]

    @property
    def width(self) -> int:
        """Features that leave the layer."""
        return self.model.inputs(self.index + 1)

    def choice(self, split: Split) -> ShardingChoice | None:
        """What the layer's kind says of a way to share it out; None where it cannot be."""
        return choice_of(self.layer, split)

    def can(self, split: Split) -> bool:
        """Whether the layer's kind says that it can be shared out in a way, or left whole."""
        if split is Split.REPLICATED:
            return bool(kind_of(self.layer).parts(self.layer))
        return split is Split.OUTSIDE or self.choice(split) is not None

    def leaves_uneven_units(self, split: Split) -> bool:
        """Whether ranks get unequal numbers of what the layer has within."""
        choice = self.choice(split)
        return choice is not None and choice.units is not None and choice.units % self.tp != 0

    def cuts_through_units(self, split: Split) -> bool:
        """Whether equal parts of features, rounded up, end within some of what the layer has within, as in a head."""
        choice = self.choice(split)
        if choice is None or choice.units is None:
            return False
        found = kind_of(self.layer).parameters(self.layer, self.model.inputs(self.index))
        sizes = {each.shape[each.within_dim] for each in found if each.within_dim is not None}
        shares = chunk_sizes(choice.units, self.tp)
        return any(chunk_sizes(size, self.tp) != tuple(size // choice.units * share for share in shares) for size in sizes)


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
    is_within: bool = False
    """Whether its repair changes nothing that other layers, or other entries, see."""
    of_dtensors: bool = False
    """Whether it holds for DTensors alone: plain tensors are cut and put together by what says how they are."""


def _with_layer(training: Training, index: int, **changes: bool | None) -> Training:
    return each_layer(training, lambda at, layer: layer.having(**changes) if at == index else layer)


def _with_even_units(training: Training, place: LayerSite) -> Training:
    """As many units as the next multiple; another kind of layer where that of this one does not say what has as many."""
    even = kind_of(place.layer).with_even_units(place.layer, place.tp).rounded(place.tp)
    return shared_out(training, place.index) if even == place.layer else with_layer(training, place.index, even)


def _unrouted(training: Training, place: LayerSite) -> Training:
    """One unit for every row; another kind of layer where that of this one does not say what that would be."""
    plain = place.layer.without_routing()
    return shared_out(training, place.index) if plain == place.layer else with_layer(training, place.index, plain)


RULES: tuple[PlanRule, ...] = (
    PlanRule(
        reason="tensor parallelism: a split that the layer's kind does not declare is not supported: linear layers are split "
        "by outputs or inputs, others by heads or hidden features, and a kind that does not declare its linears stays outside "
        "the plan",
        broken=lambda place, plan: not place.can(plan.split),
        repair=lambda training, _layout, place: shared_out(training, place.index),
    ),
    PlanRule(
        reason="parallelize_module: a layer whose ranks compute partial sums of its output, such as experts split by hidden "
        "features, is not supported: its parallel styles are for modules that are linears; use plain tensors",
        broken=lambda place, plan: weights_of_addends(place.layer, plan.split) is not None,
        repair=lambda training, _layout, place: _unrouted(training, place),
        of_dtensors=True,
    ),
    PlanRule(
        reason="parallelize_module: heads of key and value, or hidden features, that are not a multiple of the ranks are not "
        "supported: each is computed on one rank, and local tensors do not know how they were split (pytorch#150336)",
        broken=lambda place, plan: place.leaves_uneven_units(plan.split),
        repair=lambda training, _layout, place: _with_even_units(training, place),
        is_within=True,
        of_dtensors=True,
    ),
    PlanRule(
        reason="tensor parallelism: a shard that ends within a head of key and value, or another unit, is not supported: each "
        "unit is computed on one rank, but features are split into equal parts, rounded up",
        broken=lambda place, plan: place.cuts_through_units(plan.split),
        repair=lambda training, _layout, place: _with_even_units(training, place),
        is_within=True,
    ),
    PlanRule(
        reason="tensor parallelism: a norm of features that are sharded is not supported: it needs all features of a row",
        broken=lambda place, _plan: place.layer.norm is not None and place.input is ActivationSharding.FEATURES,
        repair=lambda training, _layout, place: _with_layer(training, place.index, norm=None),
    ),
    PlanRule(
        reason="tensor parallelism: a residual around a layer whose input and output are sharded differently is not supported: "
        "the two cannot be added",
        broken=lambda place, plan: place.layer.residual and plan.output is not place.input,
        repair=lambda training, _layout, place: _with_layer(training, place.index, residual=False),
    ),
    PlanRule(
        reason="tensor parallelism: a layer that counts features that its plan shards is not supported: a local tensor does "
        "not know where it starts",
        broken=lambda place, plan: place.layer.shape_op is ShapeOp.ARANGE and plan.output is ActivationSharding.FEATURES,
        repair=lambda training, _layout, place: _with_layer(training, place.index, shape_op=None),
    ),
    PlanRule(
        reason="parallelize_module: rows, or positions of sequences, that are sharded between layers and not a multiple of the "
        "ranks are not supported: local tensors do not know how they were split",
        broken=lambda place, plan: ActivationSharding.ROWS in (place.input, plan.output) and place.has_uneven_rows,
        repair=lambda training, layout, place: (
            with_rows(training, layout.num_data_ranks * place.tp)
            if training.model.length is None
            else with_positions(training, place.tp)
        ),
        upstream=True,
        of_dtensors=True,
    ),
    PlanRule(
        reason="parallelize_module: features that are sharded between layers and not a multiple of the ranks are not "
        "supported: local tensors do not know how they were split (pytorch#150336)",
        broken=lambda place, plan: plan.output is ActivationSharding.FEATURES and place.width % place.tp != 0,
        repair=lambda training, _layout, place: with_widths(training, place.tp),
        upstream=True,
        of_dtensors=True,
    ),
)
"""What a plan may not do at its place; rules about the whole plan are in `legal_plans` and in the layout's limits."""


def legal_plans(place: LayerSite, *, beyond: bool = False, repaired: bool = False, local: bool = False) -> tuple[LayerPlan, ...]:
    """What can run for a layer in a place, such that the layers after it can run as well.

    Empty only where no plan of the layers before leaves its input as the place has it. Rules that torch makes do not count with
    `beyond`, those for DTensors alone with `local`, and with `repaired` those that a repair within the layer comes up to.
    """
    left_out = (("upstream", beyond), ("is_within", repaired), ("of_dtensors", local))
    rules = tuple(rule for rule in RULES if not any(given and getattr(rule, name) for name, given in left_out))
    return tuple(plan for plan in ALL_PLANS if not _breaks(place, plan, rules) and _can_go_on(place, plan, rules))


def _breaks(place: LayerSite, plan: LayerPlan, rules: tuple[PlanRule, ...]) -> bool:
    is_cut_off = plan.split is Split.OUTSIDE and place.input is not ActivationSharding.WHOLE
    return is_cut_off or any(rule.broken(place, plan) for rule in rules)


def _can_go_on(place: LayerSite, plan: LayerPlan, rules: tuple[PlanRule, ...]) -> bool:
    after = place.index + 1
    if after == len(place.model.layers):
        return plan.output in place.ends
    following = replace(place, index=after, input=plan.output)
    return any(not _breaks(following, entry, rules) and _can_go_on(following, entry, rules) for entry in ALL_PLANS)


def inputs_of(model: Model, parallelism: PlannedParallelism) -> tuple[ActivationSharding, ...]:
    """How the input of each layer lies, and last that of the head, or of the loss."""
    first = ActivationSharding.WHOLE if model.source is None else parallelism.source_output
    return (first, *(entry.output for entry in parallelism.plan))


def places(model: Model, parallelism: PlannedParallelism, tp: int, microbatches: tuple[int, ...]) -> tuple[LayerSite, ...]:
    """Where each entry of a plan of as many entries as layers would run."""
    inputs = inputs_of(model, parallelism)[:-1]
    return tuple(
        LayerSite(model=model, index=index, input=sharding, tp=tp, rows=microbatches) for index, sharding in enumerate(inputs)
    )


def fits(model: Model, plan: tuple[LayerPlan, ...]) -> bool:
    """Whether a plan has one entry a layer."""
    return len(plan) == len(model.layers)


def fitted(training: Training, plan: tuple[LayerPlan, ...]) -> Training:
    """The training with as many layers as the plan has entries."""
    return with_num_layers(training, len(plan))


def is_outside(parallelism: PlannedParallelism, parameter: Parameter) -> bool:
    """Whether a plan leaves a parameter a plain tensor, as it does with those of the model itself."""
    return parallelism.split_of(parameter) is Split.OUTSIDE


def splits_weights(parallelism: PlannedParallelism) -> bool:
    """Whether a plan gives ranks different parts of some weight."""
    splits = {parallelism.source, parallelism.head, *(entry.split for entry in parallelism.plan)}
    return not splits <= {Split.REPLICATED, Split.OUTSIDE}


def cuts(model: Model, parallelism: PlannedParallelism) -> Iterator[tuple[Parameter, int]]:
    """Each parameter that a plan cuts, and the size of the dim along which it does."""
    for parameter in parameters_of(model):
        dim = cut_dim(parallelism, parameter)
        if dim is not None:
            yield parameter, parameter.shape[dim]


def trained_cuts(model: Model, parallelism: PlannedParallelism) -> Iterator[int]:
    """The sizes of those that are trained."""
    return (size for parameter, size in cuts(model, parallelism) if parameter.trained)


def rows_dim(model: Model) -> int:
    """The dim of an activation that is cut where it lies by rows: that of positions where rows are sequences."""
    return 0 if model.length is None else 1


def computes_rows_apart(model: Model) -> bool:
    """Whether a linear that is whole on every rank computes each rank's rows there; positions are gathered for it."""
    return model.length is None


def has_pending_gradients(model: Model, parallelism: PlannedParallelism) -> bool:
    """Whether the gradient of some parameter comes out pending a sum: each rank has it whole, and has seen some of the rows."""
    *inputs, last = inputs_of(model, parallelism)
    if last is ActivationSharding.ROWS and model.head is not None and model.head.norm is not None:
        return True
    return any(
        sharding is ActivationSharding.ROWS
        and (layer.norm is not None or (entry.split is Split.REPLICATED and not layer.frozen and computes_rows_apart(model)))
        for layer, entry, sharding in zip(model.layers, parallelism.plan, inputs, strict=True)
    )


def unfrozen_norms(model: Model, layout: Layout) -> set[int]:
    """The frozen layers whose norms `SequenceParallel`, which takes inputs that lie by rows, makes trainable."""
    return {
        index
        for parallelism in layout.of(TensorParallel)
        for index, (layer, sharding) in enumerate(zip(model.layers, inputs_of(model, parallelism), strict=False))
        if layer.norm is not None and layer.frozen and sharding is ActivationSharding.ROWS
    }


def frozen_splits(model: Model, layout: Layout) -> set[str]:
    """The frozen parameters of linears and embeddings that ranks share out, by canonical name."""
    return {
        parameter.full_name
        for parallelism in layout.of(TensorParallel)
        for parameter in parameters_of(model)
        if not parameter.trained
        and parallelism.split_of(parameter) not in (Split.REPLICATED, Split.OUTSIDE)
        and not parameter.is_of_norm
        and parameter.full_name != POSITIONS
    }


def units_of_nothing(model: Model, parallelism: PlannedParallelism, tp: int) -> list[bool]:
    """Of each layer, and of what the model has beside, whether a plan leaves the last rank no element of any parameter."""
    cut = {parameter.full_name: size for parameter, size in cuts(model, parallelism)}
    return [
        all(parameter.full_name in cut and leaves_nothing(cut[parameter.full_name], tp) for parameter in unit)
        for unit in by_layer(parameters_of(model))
    ]
