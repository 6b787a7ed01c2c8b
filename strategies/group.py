"""Parameter groups."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivcheck.scenario import Group, Select

_SELECTS = st.sampled_from(Select)
_LR_FACTORS = st.sampled_from((1.0, 0.5, 2.0))
_DECAYS = st.sampled_from((0.0, 0.1))


@st.composite
def groups(draw: DrawFn) -> Group:
    """Groups, half of them without weight decay; `trainings` takes the decay away under an optimizer that has none."""
    return Group(select=draw(_SELECTS), lr_factor=draw(_LR_FACTORS), weight_decay=draw(_DECAYS))
