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

    layer: int
    """Index of the layer that owns it."""
    name: str
    """Name within its layer, as ``linear.weight``."""
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
        return f"layers.{self.layer}.{self.name}"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def parameters_of(model: Model) -> tuple[Parameter, ...]:
    """Each distinct parameter once, in the order of `torch.nn.Module.named_parameters`."""
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
    """The parameters of each layer that owns any."""
    found: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.layer, []).append(parameter)
    return list(found.values())
