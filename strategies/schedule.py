"""Learning-rate schedules."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivcheck.scenario import CosineAnnealingLR, ExponentialLR, LinearLR, Schedule, StepLR

_CHOICES: st.SearchStrategy[Schedule] = st.sampled_from(
    (
        StepLR(),
        ExponentialLR(),
        LinearLR(),
        CosineAnnealingLR(),
        StepLR(step_size=2),
        ExponentialLR(gamma=0.9),
        LinearLR(start_factor=0.5, total_iters=2),
        CosineAnnealingLR(T_max=2),
    )
)


@st.composite
def schedules(draw: DrawFn) -> Schedule:
    """Schedules that change the rate within the few steps of a training."""
    return draw(_CHOICES)
