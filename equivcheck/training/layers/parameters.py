"""Names, shapes and sizes of a model's parameters, computed without building the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from equivcheck.scenario import Model, ParameterOwner
from equivcheck.training.layers.facts import Initialization, LayerParameter
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.token_facts import EMBEDDING, POSITIONS, embedding_parameters, head_parameters

KEPT_MODELS = 64
"""Maximum number of cached models, because many functions request the same parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(LayerParameter):
    """One parameter in a model. Its `name` is the name within its layer, or the full name if no layer owns it."""

    layer: int | None
    """Index of the layer that owns the parameter; None if the model itself owns it."""
    trained: bool
    """Whether the parameter has `requires_grad=True`."""

    @property
    def owner(self) -> ParameterOwner:
        """Return the part of the model that owns the parameter: a layer, the embedding, the head, or the model itself."""
        if self.layer is not None:
            return ParameterOwner.LAYER
        if self.name in (EMBEDDING, POSITIONS):
            return ParameterOwner.SOURCE
        return ParameterOwner.HEAD if self.name.startswith("head.") else ParameterOwner.MODEL

    @property
    def is_norm_parameter(self) -> bool:
        """Whether the parameter belongs to a norm."""
        return is_norm_parameter(self.name)

    @property
    def full_name(self) -> str:
        """Return the canonical name in the model."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def is_norm_parameter(name: str) -> bool:
    """Whether the parameter with this name in its module, or in the model, belongs to a norm."""
    return name.rpartition(".")[0].endswith("norm")


SCALE = Parameter(layer=None, name="scale", shape=(), trained=True, initial=Initialization.FACTOR)
"""Parameter that multiplies the outputs in a model with `scale`."""


def layer_of(full_name: str) -> int | None:
    """Return the index of the layer that owns the parameter with this canonical name.

    None if the model itself owns the parameter.
    """
    return int(full_name.split(".")[1]) if full_name.startswith("layers.") else None


@lru_cache(maxsize=KEPT_MODELS)
def parameters_of(model: Model) -> tuple[Parameter, ...]:
    """List distinct parameters in the order of `torch.nn.Module.named_parameters`.

    The order is: the model's scale, embeddings, layers, head.
    """
    embeds = model.source is not None and not model.source.frozen
    head = (replace(parameter, name=f"head.{parameter.name}") for parameter in head_parameters(model))
    return (
        *(SCALE,) * model.scale,
        *(_owned(parameter, None, trained=embeds) for parameter in embedding_parameters(model)),
        *_of_layers(model),
        *(_owned(parameter, None, trained=True) for parameter in head),
    )


def trains_layer(model: Model, index: int, step: int) -> bool:
    """Whether a layer uses a trained parameter in a step: its own parameter, or a weight of another layer."""
    shares = model.layers[index].shares
    if shares is not None and not model.layers[shares].frozen:
        return True
    own = (parameter for parameter in parameters_of(model) if parameter.layer == index)
    return any(parameter.trained and parameter.is_used_at(step) for parameter in own)


def _of_layers(model: Model) -> Iterator[Parameter]:
    for index, layer in enumerate(model.layers):
        for parameter in layer_kind(layer).parameters(layer, model.in_features(index)):
            yield _owned(parameter, index, trained=not layer.frozen and not parameter.is_frozen)


def _owned(parameter: LayerParameter, layer: int | None, *, trained: bool) -> Parameter:
    stated = {field.name: getattr(parameter, field.name) for field in fields(LayerParameter)}
    return Parameter(**stated, layer=layer, trained=trained)


def group_by_layer(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Group parameters by the layer that owns them. Parameters that the model itself owns form one group."""
    found: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.layer, []).append(parameter)
    return list(found.values())
