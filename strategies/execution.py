"""How a layout is run."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Compile, Execution, Recompute

NEVER: SearchStrategy[bool] = st.just(False)
RARELY: SearchStrategy[bool] = st.sampled_from((False,) * 59 + (True,))
"""Once in 60: a compiled scenario costs as much as hundreds of others."""
COMPILED: SearchStrategy[Execution] = st.sampled_from(
    (
        *(Execution(compile=Compile.AOT_EAGER),) * 4,
        *(Execution(compile=Compile.AOT_EAGER, per_layer=True),) * 3,
        *(Execution(compiled_autograd=True),) * 4,
        *(Execution(compile=Compile.AOT_EAGER, compiled_autograd=True),) * 4,
        Execution(compile=Compile.INDUCTOR),
    )
)
"""Forward compiled as a whole or by layers, backward, both; one in sixteen by Inductor, which takes several times as long."""

_SELDOM = st.sampled_from((False,) * 11 + (True,))
"""Tracing a step costs as much as running ten."""
_CHECKPOINTINGS = st.sampled_from((Recompute.NONE,) * 6 + (Recompute.ODD_LAYERS, Recompute.EVERY_LAYER))


@st.composite
def executions(
    draw: DrawFn, *, compiles: SearchStrategy[bool] = NEVER, compiled: SearchStrategy[Execution] = COMPILED
) -> Execution:
    """Executions, a quarter with activation checkpointing, some traced; one of `compiled` where `compiles` says so."""
    execution = draw(compiled) if draw(compiles) else Execution(whole_step=draw(_SELDOM))
    checkpointing = draw(_CHECKPOINTINGS)
    return execution if checkpointing is Recompute.NONE else replace(execution, checkpointing=checkpointing)
