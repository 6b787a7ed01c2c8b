"""Which modules a plan replaces, by what: arithmetic on nouns, for ranks and for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from equivcheck.layouts.base.partition import cut_dim
from equivcheck.layouts.base.plan.linears import Passage, head_passage, passage
from equivcheck.layouts.base.plan.rules import inputs_of, weights_of_addends
from equivcheck.layouts.parallelisms.local_tensor_parallel.routes import Route, embedded, entering, gathered, leaving, summed
from equivcheck.scenario import ActivationSharding, AnyLayer, LocalTensorParallel, Model, Split
from equivcheck.training.layers.parameters import KEPT_MODELS, parameters_of
from equivcheck.training.layers.registry import kind_of
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS


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
