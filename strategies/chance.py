"""How often an option is on. Off comes first, so that examples shrink to plain ones.

Hypothesis mutates examples choice by choice, so weights are small: a value that several choices give makes equal examples.
While shrinking, an example with fewer choices counts as simpler, whatever the choices are. A plain option must therefore take
no more choices than others, and several options may need to share one choice.
"""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SOMETIMES: SearchStrategy[bool] = st.sampled_from((False, False, True))
"""On in a third."""
RARELY: SearchStrategy[bool] = st.sampled_from((False,) * 5 + (True,))
"""On in a sixth."""
MOSTLY: SearchStrategy[bool] = st.sampled_from((False, True, True))
"""On in two thirds."""
EVENLY: SearchStrategy[bool] = st.booleans()
"""On in half."""

SEEDS: SearchStrategy[int] = st.integers(0, 2**32 - 1)
"""Any seed."""


@cache
def indices_below(count: int) -> SearchStrategy[int]:
    """An index into `count` choices. Cached, because building a strategy costs more than drawing from it."""
    return st.integers(0, count - 1)
