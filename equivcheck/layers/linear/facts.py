"""The parameters of a linear layer, as its noun says they are."""

from __future__ import annotations

from collections.abc import Mapping

from equivcheck.scenario import Layer, Norm

Shape = tuple[int, ...]

COLUMN_DIMS: Mapping[str, int] = {"linear.weight": 0, "linear.bias": 0, "auxiliary.weight": 0}
"""The dim of each parameter that a column-parallel layer cuts; others stay whole."""
ROW_DIMS: Mapping[str, int] = {"linear.weight": 1, "auxiliary.weight": 1}
"""The dim of each parameter that a row-parallel layer cuts; others stay whole."""


def shapes(layer: Layer, inputs: int) -> Mapping[str, Shape]:
    """Each parameter that the layer owns, in the order of `torch.nn.Module.named_parameters`, with its shape."""
    matrix, vector = (layer.width, inputs), (layer.width,)
    owned: dict[str, Shape | None] = {
        "norm.weight": None if layer.norm is None else (inputs,),
        "norm.bias": (inputs,) if layer.norm is Norm.LAYER else None,
        "linear.weight": matrix if layer.shares is None else None,
        "linear.bias": vector if layer.bias else None,
        "auxiliary.weight": None if layer.auxiliary is None else matrix,
    }
    return {name: shape for name, shape in owned.items() if shape is not None}
