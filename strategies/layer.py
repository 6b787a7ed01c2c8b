"""Layers by themselves; what depends on a layer's neighbours is up to `models`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Activation, Layer, Norm, Side
from equivcheck.strategies.chance import RARELY, USUALLY

WIDTHS: SearchStrategy[int] = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 2, 4, 8, 12, 16, 32))
"""Few values, so that layers often have equal shapes; those that many meshes divide come twice."""
ACTIVATIONS: SearchStrategy[Activation] = st.sampled_from(Activation)
NORMS: SearchStrategy[Norm | None] = st.sampled_from((None, None, None, Norm.LAYER, Norm.RMS))
DROPOUTS: SearchStrategy[float] = st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.5, 0.25))
SIDES: SearchStrategy[Side | None] = st.sampled_from((None, None, None, None, None, None, Side.NEVER, Side.EVEN_STEPS))


@st.composite
def layers(
    draw: DrawFn,
    *,
    widths: SearchStrategy[int] = WIDTHS,
    activations: SearchStrategy[Activation] = ACTIVATIONS,
    norms: SearchStrategy[Norm | None] = NORMS,
    dropouts: SearchStrategy[float] = DROPOUTS,
    sides: SearchStrategy[Side | None] = SIDES,
) -> Layer:
    """Layers with weights of their own. One that is residual is given as many inputs as outputs by `models`."""
    return Layer(
        width=draw(widths),
        activation=draw(activations),
        bias=draw(USUALLY),
        norm=draw(norms),
        residual=draw(RARELY),
        dropout=draw(dropouts),
        frozen=draw(RARELY),
        side=draw(sides),
    )
