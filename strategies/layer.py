"""Strategies for single layers. `models` fits a layer to its neighbours."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Activation, AuxiliaryLinear, Layer, Norm, ShapeOp
from equivcheck.scenario.layers.linear import MAX_WIDTH
from equivcheck.strategies.chance import EVENLY, SOMETIMES

WIDTHS: SearchStrategy[int] = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)) | st.integers(1, MAX_WIDTH)
"""Strategy for widths: mostly a few common values, so that layers often have equal shapes. Every mesh size divides some of them,
and no mesh size divides all.
"""
ACTIVATIONS: SearchStrategy[Activation] = st.sampled_from(Activation)

_NORMS = st.sampled_from((None, Norm.LAYER, Norm.RMS))
_DROPOUTS = st.sampled_from((0.0, 0.0, 0.5, 0.25))
_SHAPE_OPS = st.sampled_from((None,) * len(ShapeOp) + tuple(ShapeOp))
_AUXILIARY_LINEARS = st.sampled_from((None, None, None, AuxiliaryLinear.NEVER, AuxiliaryLinear.EVEN_STEPS))


@st.composite
def layers(draw: DrawFn, *, widths: SearchStrategy[int] = WIDTHS, activations: SearchStrategy[Activation] = ACTIVATIONS) -> Layer:
    """Draw linear layers with their own weights. Half of them have no options.

    `widths` and `activations` are the strategies for these fields. The strategy `models` gives a residual layer as many inputs as
    outputs.
    """
    width, activation, has_options = draw(widths), draw(activations), draw(EVENLY)
    if not has_options:
        return Layer(width=width, activation=activation)
    return Layer(
        width=width,
        activation=activation,
        bias=not draw(SOMETIMES),
        norm=draw(_NORMS),
        residual=draw(SOMETIMES),
        dropout=draw(_DROPOUTS),
        frozen=draw(SOMETIMES),
        auxiliary=draw(_AUXILIARY_LINEARS),
        shape_op=draw(_SHAPE_OPS),
    )
