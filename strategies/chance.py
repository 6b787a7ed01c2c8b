"""Strategies for the probability of an option.

The value without the option comes first, so that examples shrink to plain examples.

Hypothesis mutates examples choice by choice, so weights are small: a value that several choices give makes equal examples. While
shrinking, an example with fewer choices counts as simpler, whatever the choices are. A plain option must therefore take no more
choices than others, and several options may need to share one choice.
"""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SOMETIMES: SearchStrategy[bool] = st.sampled_from((False, False, True))
"""Strategy for a boolean, True in one third of the draws."""
RARELY: SearchStrategy[bool] = st.sampled_from((False,) * 5 + (True,))
"""Strategy for a boolean, True in one sixth of the draws."""
MOSTLY: SearchStrategy[bool] = st.sampled_from((False, True, True))
"""Strategy for a boolean, True in two thirds of the draws."""
USUALLY: SearchStrategy[bool] = st.sampled_from((True,) * 11 + (False,))
"""Strategy for whether to avoid a known issue. One in twelve keeps the issue, because torch may fix it."""
EVENLY: SearchStrategy[bool] = st.booleans()
"""Strategy for a boolean, True in half of the draws."""

SEEDS: SearchStrategy[int] = st.integers(0, 2**32 - 1)
"""Strategy for any valid seed."""


@cache
def indices_below(count: int) -> SearchStrategy[int]:
    """Return a strategy for an index from 0 to ``count - 1``.

    It is cached, because building a strategy costs more than drawing from it.
    """
    return st.integers(0, count - 1)
