"""How often an option is on: off comes first, so that examples shrink to plain ones.

Hypothesis varies examples choice by choice, so a value that several choices give makes equal examples: weights are kept small.
The simpler of two examples is the one of fewer choices, only then that of lower ones: what is plain must take no more choices
than what is not, hence options behind one choice for all of them.
"""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SOMETIMES: SearchStrategy[bool] = st.sampled_from((False, False, True))
"""On in a third of all examples."""
RARELY: SearchStrategy[bool] = st.sampled_from((False,) * 5 + (True,))
"""On in a sixth."""
MOSTLY: SearchStrategy[bool] = st.sampled_from((False, True, True))
"""On in two thirds."""
EVENLY: SearchStrategy[bool] = st.booleans()
"""On in half."""

SEEDS: SearchStrategy[int] = st.integers(0, 2**32 - 1)
"""Any seed."""


@cache
def below(count: int) -> SearchStrategy[int]:
    """An index into `count` choices; kept, as building a strategy costs more than drawing from it."""
    return st.integers(0, count - 1)
