"""Gradient clipping."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import ClipNorm, ClipValue, NormType
from equivcheck.scenario.clipping import Clipping

THRESHOLDS: SearchStrategy[float] = st.sampled_from((0.1, 0.01, 1.0, 100.0))
"""Mostly below the norms that gradients have here, so that clipping is active; a shrunk example keeps it active."""

_BY_NORM: tuple[NormType | None, ...] = (NormType.TWO, NormType.ONE, NormType.INF)
_KINDS = st.sampled_from((*_BY_NORM, None))


@st.composite
def clippings(draw: DrawFn, *, thresholds: SearchStrategy[float] = THRESHOLDS) -> Clipping:
    """Clipping by one of the norms or by value."""
    norm_type = draw(_KINDS)
    if norm_type is None:
        return ClipValue(clip_value=draw(thresholds))
    return ClipNorm(norm_type=norm_type, max_norm=draw(thresholds))
