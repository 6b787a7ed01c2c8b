"""Modules that a plan replaces, and the redistributions around them.

This module imports no torch, so that ranks and scripts share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from equivcheck.layouts.base.partition import shard_dim
from equivcheck.layouts.base.plan.linears import (
    BY_ROWS,
    COLUMN,
    OF_SHARDING,
    ROW,
    WHOLE,
    ActivationPlacement,
    LinearPlacements,
    LinearPlan,
    head_plan,
    linear_plan,
)
from equivcheck.layouts.base.plan.rules import inputs_of, num_routing_weights
from equivcheck.scenario import ActivationSharding, AnyLayer, LocalTensorParallel, Model, Split
from equivcheck.training.layers.parameters import KEPT_MODELS, parameters_of
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS

_LINEARS = {Split.COLWISE: COLUMN, Split.ROWWISE: ROW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """Placements of an activation before and after redistribution, and of the activation's gradient in backward."""

    source: ActivationPlacement
    """Placement of the input, the activation before redistribution."""
    target: ActivationPlacement
    """Placement of the output, the activation after redistribution."""
    gradient_source: ActivationPlacement
    """Placement of the output's gradient in backward."""
    gradient_target: ActivationPlacement
    """Placement of the input's gradient in backward."""
    features: int
    """Number of features over all ranks."""

    @property
    def moves(self) -> bool:
        """Whether the placement changes in forward or backward."""
        return self.source is not self.target or self.gradient_source is not self.gradient_target


REDUCE_PARTIAL = Redistribution(
    source=ActivationPlacement.PARTIAL,
    target=ActivationPlacement.REPLICATED,
    gradient_source=ActivationPlacement.REPLICATED,
    gradient_target=ActivationPlacement.REPLICATED,
    features=0,
)
"""Redistribution from partial sums to a replicated sum."""
COPY_TO_PARTIAL = Redistribution(
    source=ActivationPlacement.REPLICATED,
    target=ActivationPlacement.REPLICATED,
    gradient_source=ActivationPlacement.PARTIAL,
    gradient_target=ActivationPlacement.REPLICATED,
    features=0,
)
"""Redistribution for replicated values from which each rank computes a partial sum. Backward sums their gradients over ranks."""


def linear_input(plan: LinearPlan, features: int) -> Redistribution:
    """Return the redistribution before a linear layer."""
    linear, before = _linear(plan), OF_SHARDING[plan.input]
    return Redistribution(
        source=before,
        target=linear.wanted,
        gradient_source=linear.input_gradient,
        gradient_target=before,
        features=features,
    )


def linear_output(plan: LinearPlan, features: int) -> Redistribution:
    """Return the redistribution after a linear layer."""
    return _leaving(_linear(plan).made, plan.output, features)


def region_input(input: ActivationSharding, features: int) -> Redistribution:
    """Return the redistribution to replicate a layer's input.

    All ranks then compute their partial sums from the same input.
    """
    whole, before = ActivationPlacement.REPLICATED, OF_SHARDING[input]
    return Redistribution(source=before, target=whole, gradient_source=whole, gradient_target=before, features=features)


def region_output(output: ActivationSharding, features: int) -> Redistribution:
    """Return the redistribution to reduce a layer's partial sums to the placement `output`."""
    return _leaving(ActivationPlacement.PARTIAL, output, features)


def embedding_output(split: Split, output: ActivationSharding, features: int) -> Redistribution:
    """Return the redistribution after an embedding."""
    return _leaving(_LINEARS.get(split, WHOLE).made, output, features)


def _leaving(made: ActivationPlacement, output: ActivationSharding, features: int) -> Redistribution:
    after = OF_SHARDING[output]
    back = ActivationPlacement.REPLICATED if made is ActivationPlacement.PARTIAL else made
    return Redistribution(source=made, target=after, gradient_source=after, gradient_target=back, features=features)


def _linear(plan: LinearPlan) -> LinearPlacements:
    return BY_ROWS if plan.is_by_rows else _LINEARS.get(plan.split, WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModule:
    """Module that the plan replaces, with redistributions around it.

    A norm layer has no redistribution, an embedding has one after it, and a linear layer has one before and one after it.
    """

    name: str
    """Canonical name of the replaced module."""
    enter: Redistribution | None = None
    """Redistribution of the module's input. None for no redistribution."""
    leave: Redistribution | None = None
    """Redistribution of the module's output. None for no redistribution."""
    dims: tuple[int | None, int | None] = (None, None)
    """Sharded dims in weight and bias. None for a replicated tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRegion:
    """Layer for which each rank computes a partial sum of the output.

    An example is a layer with experts sharded by hidden features.
    """

    layer: int
    """Index of the layer in the model."""
    enter: Redistribution
    """Redistribution of the region's input, after the layer's norm."""
    leave: Redistribution
    """Redistribution to reduce the partial sums."""
    dims: tuple[tuple[str, int], ...]
    """For each sharded parameter, its name within the layer and the sharded dim."""


@lru_cache(maxsize=KEPT_MODELS)
def planned_modules(model: Model, parallelism: LocalTensorParallel) -> tuple[PlannedModule, ...]:
    """Return all modules that the plan replaces, in the model's order. Cached, because every rank needs them."""
    planning = _Planning(model, parallelism)
    layers = (
        planning.layer(index, layer)
        for index, layer in enumerate(model.layers)
        if parallelism.plan[index].split is not Split.NOT_IN_PLAN
    )
    return (*planning.source(), *chain.from_iterable(layers), *planning.head())


@lru_cache(maxsize=KEPT_MODELS)
def planned_regions(model: Model, parallelism: LocalTensorParallel) -> tuple[PlannedRegion, ...]:
    """Return all layers with partial sums on each rank, in the model's order."""
    inputs, found = inputs_of(model, parallelism), parameters_of(model)
    cut = [(each, shard_dim(parallelism, each)) for each in found]
    return tuple(
        PlannedRegion(
            layer=index,
            enter=region_input(inputs[index], model.in_features(index)),
            leave=region_output(parallelism.plan[index].output, model.in_features(index + 1)),
            dims=tuple((each.name, dim) for each, dim in cut if each.layer == index and dim is not None),
        )
        for index in range(len(model.layers))
        if num_routing_weights(model.layers[index], parallelism.plan[index].split) is not None
    )


class _Planning:
    def __init__(self, model: Model, parallelism: LocalTensorParallel) -> None:
        self.model, self.parallelism, self.inputs = model, parallelism, inputs_of(model, parallelism)
        found = parameters_of(model)
        self.dims = {parameter.full_name: shard_dim(parallelism, parameter) for parameter in found}
        self.shapes = {parameter.full_name: parameter.shape for parameter in found}

    def source(self) -> Iterator[PlannedModule]:
        source, split, output = self.model.source, self.parallelism.source, self.parallelism.source_output
        if source is None or split is Split.NOT_IN_PLAN:
            return
        leave = embedding_output(split, output, self.model.features)
        yield PlannedModule(name=_module_of(EMBEDDING), leave=leave, dims=(self.dims[EMBEDDING], None))
        if source.learned_positions:
            yield PlannedModule(name=_module_of(POSITIONS), leave=embedding_output(Split.REPLICATED, output, self.model.features))

    def layer(self, index: int, layer: AnyLayer) -> Iterator[PlannedModule]:
        owner, lies = f"layers.{index}", self.inputs[index]
        if layer.norm is not None and lies is ActivationSharding.ROWS:
            yield PlannedModule(name=f"{owner}.norm")
        is_region = num_routing_weights(layer, self.parallelism.plan[index].split) is not None
        for part in () if is_region else layer_kind(layer).linears(layer):
            name = f"{owner}.{part.name}"
            owned = name if f"{name}.weight" in self.shapes else f"layers.{layer.shares}.{part.name}"
            yield self._linear(name, linear_plan(self.model, part, self.parallelism.plan[index], lies), owned)

    def head(self) -> Iterator[PlannedModule]:
        head = self.model.head
        if head is None or self.parallelism.head is Split.NOT_IN_PLAN:
            return
        if head.norm is not None and self.inputs[-1] is ActivationSharding.ROWS:
            yield PlannedModule(name="head.norm")
        owned = _module_of(EMBEDDING) if head.tied else "head.linear"
        yield self._linear("head.linear", head_plan(self.model, self.parallelism), owned)

    def _linear(self, name: str, plan: LinearPlan, owned: str) -> PlannedModule:
        shape = self.shapes[f"{owned}.weight"]
        dims = self.dims[f"{owned}.weight"], self.dims.get(f"{name}.bias")
        return PlannedModule(name=name, enter=linear_input(plan, shape[1]), leave=linear_output(plan, shape[0]), dims=dims)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
