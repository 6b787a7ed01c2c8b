"""The parameters of a model, as its noun says they are: what all asks that reckons with names, shapes and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from equivcheck.layers.linear.facts import COLUMN_DIMS, ROW_DIMS, Shape, shapes
from equivcheck.scenario import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter, whole."""

    layer: int | None
    """Index of the layer that owns it; None for a parameter of the model itself."""
    name: str
    """Name within its owner, as ``linear.weight``."""
    shape: Shape
    """Full shape."""
    trained: bool
    """Whether it requires a gradient."""
    column_dim: int | None
    """The dim that a column-parallel layer cuts; None for what it leaves whole."""
    row_dim: int | None
    """The dim that a row-parallel layer cuts; None for what it leaves whole."""

    @property
    def full_name(self) -> str:
        """Canonical name in the model."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


SCALE = Parameter(layer=None, name="scale", shape=(), trained=True, column_dim=None, row_dim=None)
"""What multiplies the outputs of a model with a scale."""


def layer_of(full_name: str) -> int | None:
    """Index of the layer that owns the parameter of that canonical name; None for one of the model itself."""
    return int(full_name.split(".")[1]) if full_name.startswith("layers.") else None


def parameters_of(model: Model) -> tuple[Parameter, ...]:
    """Each distinct parameter once, in the order of `torch.nn.Module.named_parameters`: the model's own, then those of layers."""
    return (SCALE,) * model.scale + _of_layers(model)


def _of_layers(model: Model) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            layer=index,
            name=name,
            shape=shape,
            trained=not layer.frozen,
            column_dim=COLUMN_DIMS.get(name),
            row_dim=ROW_DIMS.get(name),
        )
        for index, layer in enumerate(model.layers)
        for name, shape in shapes(layer, model.inputs(index)).items()
    )


def by_layer(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """The parameters of each layer that owns any, and those of the model itself, if it has any."""
    found: dict[int | None, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.layer, []).append(parameter)
    return list(found.values())
