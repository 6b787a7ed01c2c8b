"""The parameters of a model, as its noun says they are: what all asks that reckons with names, shapes and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from equivcheck.scenario import AuxiliaryLinear, Model, Owner
from equivcheck.training.layers.facts import Initial, ParameterOf
from equivcheck.training.layers.registry import kind_of
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS, embedding_parameters, head_parameters

KEPT_MODELS = 64
"""Models whose parameters are kept: all that reckons with a scenario asks for them again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(ParameterOf):
    """One parameter of a model, whole; one of the model itself has its full name."""

    layer: int | None
    """Index of the layer that owns it; None for a parameter of the model itself."""
    trained: bool
    """Whether it requires a gradient."""

    @property
    def owner(self) -> Owner:
        """What part of the model it belongs to."""
        if self.layer is not None:
            return Owner.LAYER
        if self.name in (EMBEDDING, POSITIONS):
            return Owner.SOURCE
        return Owner.HEAD if self.name.startswith("head.") else Owner.MODEL

    @property
    def is_of_norm(self) -> bool:
        """Whether it is a parameter of a normalisation."""
        return self.name.rpartition(".")[0].endswith("norm")

    @property
    def full_name(self) -> str:
        """Canonical name in the model."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def takes_part(self, step: int) -> bool:
        """Whether it is used in a step."""
        return self.runs is None or (self.runs is AuxiliaryLinear.EVEN_STEPS and step % 2 == 0)


SCALE = Parameter(layer=None, name="scale", shape=(), trained=True, initial=Initial.FACTOR)
"""What multiplies the outputs of a model with a scale."""


def layer_of(full_name: str) -> int | None:
    """Index of the layer that owns the parameter of that canonical name; None for one of the model itself."""
    return int(full_name.split(".")[1]) if full_name.startswith("layers.") else None


@lru_cache(maxsize=KEPT_MODELS)
def parameters_of(model: Model) -> tuple[Parameter, ...]:
    """Each distinct parameter once, in the order of `torch.nn.Module.named_parameters`: the model's own, then those of layers.

    The embedding comes before the layers, and the head after them.
    """
    embeds = model.source is not None and not model.source.frozen
    head = (replace(parameter, name=f"head.{parameter.name}") for parameter in head_parameters(model))
    return (
        *(SCALE,) * model.scale,
        *(_owned(parameter, None, trained=embeds) for parameter in embedding_parameters(model)),
        *_of_layers(model),
        *(_owned(parameter, None, trained=True) for parameter in head),
    )


def _of_layers(model: Model) -> Iterator[Parameter]:
    for index, layer in enumerate(model.layers):
        for parameter in kind_of(layer).parameters(layer, model.inputs(index)):
            yield _owned(parameter, index, trained=not layer.frozen)


def _owned(parameter: ParameterOf, layer: int | None, *, trained: bool) -> Parameter:
    stated = {field.name: getattr(parameter, field.name) for field in fields(ParameterOf)}
    return Parameter(**stated, layer=layer, trained=trained)


def by_layer(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """The parameters of each layer that owns any, and those of the model itself, if it has any."""
    found: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.layer, []).append(parameter)
    return list(found.values())
