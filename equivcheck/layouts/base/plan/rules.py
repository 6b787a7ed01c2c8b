"""Rules for tensor-parallel plans: which plans can run with which model.

Layers exchange local tensors, the default in `parallelize_module`. A local tensor does not know its full size, so activations
between layers must be sharded evenly. Inside a layer torch also supports uneven shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from equivcheck.layouts.base.limits.repairs import (
    all_multiples,
    each_layer,
    with_layer,
    with_positions,
    with_rows,
    with_shardable_layer,
    with_widths,
)
from equivcheck.layouts.base.partition import chunk_sizes, is_last_shard_empty, shard_dim
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
from equivcheck.training.layers.facts import LayerSharding
from equivcheck.training.layers.parameters import Parameter, group_by_layer, parameters_of
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.token_facts import POSITIONS

ALL_PLANS: tuple[LayerPlan, ...] = tuple(
    LayerPlan(split=split, output=output)
    for split, output in product(Split, ActivationSharding)
    if not (split in (Split.REPLICATED, Split.HEADS_OR_HIDDEN) and output is ActivationSharding.FEATURES)
    and (split is not Split.NOT_IN_PLAN or output is ActivationSharding.REPLICATED)
)
"""Every plan entry for a layer, simplest first."""

TIED_HALVES: dict[Split, Split] = {
    Split.NOT_IN_PLAN: Split.NOT_IN_PLAN,
    Split.REPLICATED: Split.REPLICATED,
    Split.ROWWISE: Split.COLWISE,
    Split.COLWISE: Split.ROWWISE,
}
"""Maps the embedding's split to the split of a head tied to it."""

UNFREEZES = "<2.11"
"""Versions in which frozen parameters sharded by tensor parallelism get gradients."""


def choice_of(layer: AnyLayer, split: Split) -> LayerSharding | None:
    """Return how a layer is sharded if its plan entry has `split`. None if this kind of layer does not support this split."""
    return next((choice for choice in layer_kind(layer).shardings(layer) if choice.split is split), None)


def num_routing_weights(layer: AnyLayer, split: Split) -> int | None:
    """Number of routing weights for each position. Ranks multiply their partial sums by these weights.

    None if ranks compute no partial sums.
    """
    choice = choice_of(layer, split)
    return None if choice is None else choice.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSite:
    """A layer with its position in a model and the placement of its input. Plan entries are chosen and checked for a site."""

    model: Model
    """The model."""
    index: int
    """The layer's index."""
    input: ActivationSharding
    """The layer's input placement."""
    tp: int
    """Ranks along the tensor-parallel axis."""
    rows: tuple[int, ...]
    """Rows in one forward, for each microbatch."""
    ends: tuple[ActivationSharding, ...] = (ActivationSharding.REPLICATED,)
    """Allowed placements for the last layer's output."""

    @property
    def has_uneven_rows(self) -> bool:
        """Whether the number of rows, or of positions if rows are sequences, is not a multiple of the number of ranks."""
        return not all_multiples(self.rows if self.model.length is None else (self.model.length,), self.tp)

    @property
    def layer(self) -> AnyLayer:
        """The layer's scenario object."""
        return self.model.layers[self.index]

    @property
    def width(self) -> int:
        """Number of output features."""
        return self.model.in_features(self.index + 1)

    def choice(self, split: Split) -> LayerSharding | None:
        """Return how the layer is sharded if its plan entry has `split`. None if it does not support this split."""
        return choice_of(self.layer, split)

    def supports(self, split: Split) -> bool:
        """Whether this kind of layer supports a split."""
        if split is Split.REPLICATED:
            return bool(layer_kind(self.layer).linears(self.layer))
        return split is Split.NOT_IN_PLAN or self.choice(split) is not None

    def has_uneven_units(self, split: Split) -> bool:
        """Whether the number of heads or hidden features is not a multiple of the number of ranks."""
        choice = self.choice(split)
        return choice is not None and choice.units is not None and choice.units % self.tp != 0

    def splits_units(self, split: Split) -> bool:
        """Whether some shard would end within a head, or within another unit that must stay on one rank."""
        choice = self.choice(split)
        if choice is None or choice.units is None:
            return False
        found = layer_kind(self.layer).parameters(self.layer, self.model.in_features(self.index))
        sizes = {each.shape[each.unit_dim] for each in found if each.unit_dim is not None}
        shares = chunk_sizes(choice.units, self.tp)
        return any(chunk_sizes(size, self.tp) != tuple(size // choice.units * share for share in shares) for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRule:
    """A condition under which a layer does not support a plan entry."""

    reason: str
    """Text as ``<API>: <situation> is not supported: <consequence>``, without a final dot."""
    broken: Callable[[LayerSite, LayerPlan], bool]
    """Returns whether a plan entry breaks the rule for a layer."""
    repair: Callable[[Training, Layout, LayerSite], Training]
    """Returns the nearest training that satisfies the rule."""
    upstream: bool = False
    """Whether torch raises if the rule is broken, like `Limit.upstream`."""
    is_within: bool = False
    """Whether the repair changes nothing that other layers or entries depend on."""
    of_dtensors: bool = False
    """Whether the rule holds for DTensors only. Explicit collectives on plain tensors know the full sizes."""


def _with_layer(training: Training, index: int, **changes: bool | None) -> Training:
    return each_layer(training, lambda at, layer: layer.with_fields(**changes) if at == index else layer)


def _with_even_units(training: Training, place: LayerSite) -> Training:
    """Round heads or hidden features up to a multiple, or replace the layer if its kind cannot do so."""
    even = layer_kind(place.layer).with_divisible_units(place.layer, place.tp).rounded_up(place.tp)
    return with_shardable_layer(training, place.index) if even == place.layer else with_layer(training, place.index, even)


def _unrouted(training: Training, place: LayerSite) -> Training:
    """Remove the router, or replace the layer if its kind cannot do so."""
    plain = place.layer.without_routing()
    return with_shardable_layer(training, place.index) if plain == place.layer else with_layer(training, place.index, plain)


RULES: tuple[PlanRule, ...] = (
    PlanRule(
        reason="tensor parallelism: a split that the kind of layer does not have is not supported: linear layers are split by "
        "outputs or inputs, other layers by heads or hidden features, and layers without declared linears stay outside the plan",
        broken=lambda place, plan: not place.supports(plan.split),
        repair=lambda training, _layout, place: with_shardable_layer(training, place.index),
    ),
    PlanRule(
        reason="parallelize_module: a layer whose ranks compute partial sums of its output, such as experts split by hidden "
        "features, is not supported: parallel styles such as ColwiseParallel only handle linear modules; use "
        "local_tensor_parallel",
        broken=lambda place, plan: num_routing_weights(place.layer, plan.split) is not None,
        repair=lambda training, _layout, place: _unrouted(training, place),
        of_dtensors=True,
    ),
    PlanRule(
        reason="parallelize_module: key and value heads, or hidden features, that are not a multiple of the ranks are not "
        "supported: each head or feature is computed on one rank, and a local tensor does not know the full size "
        "(pytorch#150336)",
        broken=lambda place, plan: place.has_uneven_units(plan.split),
        repair=lambda training, _layout, place: _with_even_units(training, place),
        is_within=True,
        of_dtensors=True,
    ),
    PlanRule(
        reason="tensor parallelism: a shard that ends within a key and value head, or another unit, is not supported: each head "
        "or unit must be computed on one rank, but features are split into shards of equal size",
        broken=lambda place, plan: place.splits_units(plan.split),
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
        reason="tensor parallelism: ShapeOp.ARANGE on an output sharded by features is not supported: a local tensor does "
        "not know its first feature's index",
        broken=lambda place, plan: place.layer.shape_op is ShapeOp.ARANGE and plan.output is ActivationSharding.FEATURES,
        repair=lambda training, _layout, place: _with_layer(training, place.index, shape_op=None),
    ),
    PlanRule(
        reason="parallelize_module: rows, or positions of sequences, that are sharded between layers and not a multiple of the "
        "ranks are not supported: a local tensor does not know the full size",
        broken=lambda place, plan: ActivationSharding.ROWS in (place.input, plan.output) and place.has_uneven_rows,
        repair=lambda training, layout, place: (
            with_rows(training, layout.num_data_ranks * layout.num_chunks * place.tp)
            if training.model.length is None
            else with_positions(training, place.tp)
        ),
        upstream=True,
        of_dtensors=True,
    ),
    PlanRule(
        reason="parallelize_module: features that are sharded between layers and not a multiple of the ranks are not supported: "
        "a local tensor does not know the full size (pytorch#150336)",
        broken=lambda place, plan: plan.output is ActivationSharding.FEATURES and place.width % place.tp != 0,
        repair=lambda training, _layout, place: with_widths(training, place.tp),
        upstream=True,
        of_dtensors=True,
    ),
)
"""Rules for single entries. `legal_plans` and the layout's limits check whole plans."""


def legal_plans(place: LayerSite, *, beyond: bool = False, repaired: bool = False, local: bool = False) -> tuple[LayerPlan, ...]:
    """Return the plan entries with which the layer at `place` can run, and with which later layers still have an entry, too.

    The result is empty if no entry accepts the placement of the layer's input. `beyond` ignores rules that torch enforces, and
    `local` ignores rules for DTensors only. `repaired` ignores rules that a change to this layer alone can satisfy.
    """
    left_out = (("upstream", beyond), ("is_within", repaired), ("of_dtensors", local))
    rules = tuple(rule for rule in RULES if not any(given and getattr(rule, name) for name, given in left_out))
    return tuple(plan for plan in ALL_PLANS if not _breaks(place, plan, rules) and _can_go_on(place, plan, rules))


def _breaks(place: LayerSite, plan: LayerPlan, rules: tuple[PlanRule, ...]) -> bool:
    is_cut_off = plan.split is Split.NOT_IN_PLAN and place.input is not ActivationSharding.REPLICATED
    return is_cut_off or any(rule.broken(place, plan) for rule in rules)


def _can_go_on(place: LayerSite, plan: LayerPlan, rules: tuple[PlanRule, ...]) -> bool:
    after = place.index + 1
    if after == len(place.model.layers):
        return plan.output in place.ends
    following = replace(place, index=after, input=plan.output)
    return any(not _breaks(following, entry, rules) and _can_go_on(following, entry, rules) for entry in ALL_PLANS)


def inputs_of(model: Model, parallelism: PlannedParallelism) -> tuple[ActivationSharding, ...]:
    """Return the placement of each layer's input, and as the last entry the last layer's output placement."""
    first = ActivationSharding.REPLICATED if model.source is None else parallelism.source_output
    return (first, *(entry.output for entry in parallelism.plan))


def places(model: Model, parallelism: PlannedParallelism, tp: int, rows: tuple[int, ...]) -> tuple[LayerSite, ...]:
    """Return a `LayerSite` for each layer. The plan must have one entry per layer."""
    inputs = inputs_of(model, parallelism)[:-1]
    return tuple(LayerSite(model=model, index=index, input=sharding, tp=tp, rows=rows) for index, sharding in enumerate(inputs))


def fits(model: Model, plan: tuple[LayerPlan, ...]) -> bool:
    """Whether a plan has one entry per layer."""
    return len(plan) == len(model.layers)


def is_outside(parallelism: PlannedParallelism, parameter: Parameter) -> bool:
    """Whether a parameter is not in the plan and stays a plain tensor, for example because it belongs to no layer."""
    return parallelism.split_of(parameter) is Split.NOT_IN_PLAN


def splits_weights(parallelism: PlannedParallelism) -> bool:
    """Whether a plan shards any weight."""
    splits = {parallelism.source, parallelism.head, *(entry.split for entry in parallelism.plan)}
    return not splits <= {Split.REPLICATED, Split.NOT_IN_PLAN}


def cuts(model: Model, parallelism: PlannedParallelism) -> Iterator[tuple[Parameter, int]]:
    """Yield each parameter that the plan shards, with the size of its sharded dim."""
    for parameter in parameters_of(model):
        dim = shard_dim(parallelism, parameter)
        if dim is not None:
            yield parameter, parameter.shape[dim]


def trained_shard_sizes(model: Model, parallelism: PlannedParallelism) -> Iterator[int]:
    """Yield the sharded dim's size for each trained parameter that the plan shards."""
    return (size for parameter, size in cuts(model, parallelism) if parameter.trained)


def rows_dim(model: Model) -> int:
    """Dim along which activations are sharded by rows. If rows are sequences, positions are sharded instead."""
    return 0 if model.length is None else 1


def computes_own_rows(model: Model) -> bool:
    """Whether a rank computes a replicated linear on its own rows only.

    False if rows are sequences, because then each rank gathers all positions.
    """
    return model.length is None


def has_partial_gradients(model: Model, parallelism: PlannedParallelism) -> bool:
    """Whether some parameter's gradient is partial, because each rank used the full parameter for some rows only."""
    *inputs, last = inputs_of(model, parallelism)
    if last is ActivationSharding.ROWS and model.head is not None and model.head.norm is not None:
        return True
    return any(
        sharding is ActivationSharding.ROWS
        and (layer.norm is not None or (entry.split is Split.REPLICATED and not layer.frozen and computes_own_rows(model)))
        for layer, entry, sharding in zip(model.layers, parallelism.plan, inputs, strict=True)
    )


def norms_made_trainable(model: Model, layout: Layout) -> set[int]:
    """Return the indices of frozen layers whose norms `SequenceParallel` makes trainable.

    The plan applies `SequenceParallel` to norms whose inputs are sharded by rows.
    """
    return {
        index
        for parallelism in layout.of(TensorParallel)
        for index, (layer, sharding) in enumerate(zip(model.layers, inputs_of(model, parallelism), strict=False))
        if layer.norm is not None and layer.frozen and sharding is ActivationSharding.ROWS
    }


def frozen_shards(model: Model, layout: Layout) -> set[str]:
    """Names of frozen parameters in linear layers and embeddings that the plan shards."""
    return {
        parameter.full_name
        for parallelism in layout.of(TensorParallel)
        for parameter in parameters_of(model)
        if not parameter.trained
        and parallelism.split_of(parameter) not in (Split.REPLICATED, Split.NOT_IN_PLAN)
        and not parameter.is_norm_parameter
        and parameter.full_name != POSITIONS
    }


def has_empty_units(model: Model, parallelism: PlannedParallelism, tp: int) -> list[bool]:
    """Return for each layer whether all its shards on the last rank are empty.

    The last entry in the list is for parameters outside layers.
    """
    cut = {parameter.full_name: size for parameter, size in cuts(model, parallelism)}
    return [
        all(parameter.full_name in cut and is_last_shard_empty(cut[parameter.full_name], tp) for parameter in unit)
        for unit in group_by_layer(parameters_of(model))
    ]
