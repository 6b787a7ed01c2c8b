"""Strategies for models, whose layers fit each other."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Layer, Model
from equivcheck.scenario.model import MAX_LAYERS
from equivcheck.strategies.chance import RARELY, indices_below
from equivcheck.strategies.layer import WIDTHS, layers


class _Fit(Enum):
    """Relation between a layer and earlier layers."""

    FREE = "free"
    SQUARE = "square"
    SHARED = "shared"


_DEPTHS = st.sampled_from((1, 2, 2, 3, 3, 4, 5))
_LAYERS = layers()
_BUFFERS: SearchStrategy[dict[str, Any]] = st.sampled_from(
    ({}, {"counter": True}, {"offset": True}, {"counter": True, "offset": True})
)
_FITS = st.sampled_from((_Fit.FREE, _Fit.SQUARE, _Fit.SHARED, _Fit.SHARED, _Fit.SHARED))
"""Relations to earlier layers.
Shared weights have weight three, because tensor parallelism unties weights and so loses many shared layers."""


@st.composite
def models(
    draw: DrawFn,
    *,
    layers: SearchStrategy[Layer] = _LAYERS,
    features: SearchStrategy[int] = WIDTHS,
    max_layers: int = MAX_LAYERS,
) -> Model:
    """Draw models with 1 to `max_layers` layers; some square, some sharing an earlier layer's weight, at least one trained."""
    num_layers = min(draw(_DEPTHS), max_layers)
    inputs = [draw(features)]
    stack: list[Layer] = []
    for _ in range(num_layers):
        stack.append(_fitted(draw, draw(layers), inputs, stack))
        inputs.append(stack[-1].width)
    if all(layer.frozen or layer.shares is not None for layer in stack):
        stack[0] = replace(stack[0], frozen=False)
    return Model(features=inputs[0], layers=tuple(stack), **draw(_BUFFERS), scale=draw(RARELY))


def _fitted(draw: DrawFn, layer: Layer, inputs: list[int], before: list[Layer]) -> Layer:
    fit = draw(_FITS) if before else _Fit.FREE
    if inputs[-1] == 1 and layer.norm is not None:
        # A norm over one feature is constant, so earlier gradients would be rounding errors.
        layer = replace(layer, norm=None)
    if layer.residual or fit is _Fit.SQUARE:
        layer = replace(layer, width=inputs[-1])
    if fit is not _Fit.SHARED:
        return layer
    widths = {inputs[-1]} if layer.residual else {layer.width for layer in before}
    sharable = [
        index
        for index, other in enumerate(before)
        if other.shares is None and inputs[index] == inputs[-1] and other.width in widths
    ]
    if not sharable:
        return layer
    shares = sharable[draw(indices_below(len(sharable)))]
    return replace(layer, width=before[shares].width, shares=shares)
