"""Modules that a plan replaces, and the redistributions of activations around them; without torch, for ranks and for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from equivcheck.layouts.base.partition import cut_dim
from equivcheck.layouts.base.plan.linears import (
    BY_ROWS,
    COLUMN,
    OF_SHARDING,
    ROW,
    WHOLE,
    ActivationPlacement,
    LinearPlacements,
    Passage,
    head_passage,
    passage,
)
from equivcheck.layouts.base.plan.rules import inputs_of, weights_of_addends
from equivcheck.scenario import ActivationSharding, AnyLayer, LocalTensorParallel, Model, Split
from equivcheck.training.layers.parameters import KEPT_MODELS, parameters_of
from equivcheck.training.layers.registry import kind_of
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS

_LINEARS = {Split.COLUMN: COLUMN, Split.ROW: ROW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A move of an activation, and that of its gradient."""

    source: ActivationPlacement
    """How values lie."""
    target: ActivationPlacement
    """How they are to lie."""
    gradient_source: ActivationPlacement
    """How the gradient of what is returned lies."""
    gradient_target: ActivationPlacement
    """How the gradient of the values is to lie."""
    features: int
    """Features of all ranks together."""

    @property
    def moves(self) -> bool:
        """Whether there is anything to do, in either direction."""
        return self.source is not self.target or self.gradient_source is not self.gradient_target


SUMMED = Route(
    source=ActivationPlacement.PENDING,
    target=ActivationPlacement.WHOLE,
    gradient_source=ActivationPlacement.WHOLE,
    gradient_target=ActivationPlacement.WHOLE,
    features=0,
)
"""Addends of ranks to their sum on each of them."""
COPIED = Route(
    source=ActivationPlacement.WHOLE,
    target=ActivationPlacement.WHOLE,
    gradient_source=ActivationPlacement.PENDING,
    gradient_target=ActivationPlacement.WHOLE,
    features=0,
)
"""What every rank has, for each to compute an addend with: the other way round."""


def entering(told: Passage, features: int) -> Route:
    """From how a linear finds its input to how it needs it."""
    linear, before = _linear(told), OF_SHARDING[told.input]
    return Route(
        source=before,
        target=linear.wanted,
        gradient_source=linear.input_gradient,
        gradient_target=before,
        features=features,
    )


def leaving(told: Passage, features: int) -> Route:
    """From how the output of a linear comes out to how it is to lie."""
    return _leaving(_linear(told).made, told.output, features)


def gathered(input: ActivationSharding, features: int) -> Route:
    """From how a layer finds its input to all of it on every rank, which computes alike with it."""
    whole, before = ActivationPlacement.WHOLE, OF_SHARDING[input]
    return Route(source=before, target=whole, gradient_source=whole, gradient_target=before, features=features)


def summed(output: ActivationSharding, features: int) -> Route:
    """From addends of a layer's output to how it is to lie."""
    return _leaving(ActivationPlacement.PENDING, output, features)


def embedded(split: Split, output: ActivationSharding, features: int) -> Route:
    """The same of an embedding."""
    return _leaving(_LINEARS.get(split, WHOLE).made, output, features)


def _leaving(made: ActivationPlacement, output: ActivationSharding, features: int) -> Route:
    """The gradient of addends is that of their sum."""
    after = OF_SHARDING[output]
    back = ActivationPlacement.WHOLE if made is ActivationPlacement.PENDING else made
    return Route(source=made, target=after, gradient_source=after, gradient_target=back, features=features)


def _linear(told: Passage) -> LinearPlacements:
    return BY_ROWS if told.is_by_rows else _LINEARS.get(told.split, WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModule:
    """One module of a model: a norm where nothing is moved, an embedding where its output is, a linear where both are."""

    name: str
    """Canonical name."""
    enter: Route | None = None
    """The move of its input."""
    leave: Route | None = None
    """The move of its output."""
    dims: tuple[int | None, int | None] = (None, None)
    """The dims along which its weight and its bias are cut; None for those that each rank has whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRegion:
    """A layer of whose output each rank computes an addend."""

    layer: int
    """Index of the layer."""
    enter: Route
    """The move of its input, after the norm."""
    leave: Route
    """The move of its addends."""
    dims: tuple[tuple[str, int], ...]
    """Names within the layer of the parameters that are cut, and the dim of each."""


@lru_cache(maxsize=KEPT_MODELS)
def planned_modules(model: Model, parallelism: LocalTensorParallel) -> tuple[PlannedModule, ...]:
    """Every module that is replaced, in the order of the model; kept, as every rank asks for them."""
    planning = _Planning(model, parallelism)
    layers = (
        planning.layer(index, layer)
        for index, layer in enumerate(model.layers)
        if parallelism.plan[index].split is not Split.OUTSIDE
    )
    return (*planning.source(), *chain.from_iterable(layers), *planning.head())


@lru_cache(maxsize=KEPT_MODELS)
def planned_regions(model: Model, parallelism: LocalTensorParallel) -> tuple[PlannedRegion, ...]:
    """Every one, in the order of the model; kept as modules are."""
    inputs, found = inputs_of(model, parallelism), parameters_of(model)
    cut = [(each, cut_dim(parallelism, each)) for each in found]
    return tuple(
        PlannedRegion(
            layer=index,
            enter=gathered(inputs[index], model.inputs(index)),
            leave=summed(parallelism.plan[index].output, model.inputs(index + 1)),
            dims=tuple((each.name, dim) for each, dim in cut if each.layer == index and dim is not None),
        )
        for index in range(len(model.layers))
        if weights_of_addends(model.layers[index], parallelism.plan[index].split) is not None
    )


class _Planning:
    def __init__(self, model: Model, parallelism: LocalTensorParallel) -> None:
        self.model, self.parallelism, self.inputs = model, parallelism, inputs_of(model, parallelism)
        found = parameters_of(model)
        self.dims = {parameter.full_name: cut_dim(parallelism, parameter) for parameter in found}
        self.shapes = {parameter.full_name: parameter.shape for parameter in found}

    def source(self) -> Iterator[PlannedModule]:
        source, split, output = self.model.source, self.parallelism.source, self.parallelism.source_output
        if source is None or split is Split.OUTSIDE:
            return
        leave = embedded(split, output, self.model.features)
        yield PlannedModule(name=_module_of(EMBEDDING), leave=leave, dims=(self.dims[EMBEDDING], None))
        if source.learned_positions:
            yield PlannedModule(name=_module_of(POSITIONS), leave=embedded(Split.REPLICATED, output, self.model.features))

    def layer(self, index: int, layer: AnyLayer) -> Iterator[PlannedModule]:
        owner, lies = f"layers.{index}", self.inputs[index]
        if layer.norm is not None and lies is ActivationSharding.ROWS:
            yield PlannedModule(name=f"{owner}.norm")
        is_region = weights_of_addends(layer, self.parallelism.plan[index].split) is not None
        for part in () if is_region else kind_of(layer).parts(layer):
            name = f"{owner}.{part.name}"
            owned = name if f"{name}.weight" in self.shapes else f"layers.{layer.shares}.{part.name}"
            yield self._linear(name, passage(self.model, part, self.parallelism.plan[index], lies), owned)

    def head(self) -> Iterator[PlannedModule]:
        head = self.model.head
        if head is None or self.parallelism.head is Split.OUTSIDE:
            return
        if head.norm is not None and self.inputs[-1] is ActivationSharding.ROWS:
            yield PlannedModule(name="head.norm")
        owned = _module_of(EMBEDDING) if head.tied else "head.linear"
        yield self._linear("head.linear", head_passage(self.model, self.parallelism), owned)

    def _linear(self, name: str, told: Passage, owned: str) -> PlannedModule:
        """A linear whose weight is that of `owned`, which it is given again afterwards where that is another."""
        shape = self.shapes[f"{owned}.weight"]
        dims = self.dims[f"{owned}.weight"], self.dims.get(f"{name}.bias")
        return PlannedModule(name=name, enter=entering(told, shape[1]), leave=leaving(told, shape[0]), dims=dims)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
