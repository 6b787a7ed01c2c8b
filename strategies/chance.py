"""How often an option is on: off comes first, so that examples shrink to plain ones."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

RARELY: SearchStrategy[bool] = st.sampled_from((False, False, False, False, True))
"""On in a fifth of all examples."""
SOMETIMES: SearchStrategy[bool] = st.sampled_from((False, False, True))
"""On in a third."""
EVENLY: SearchStrategy[bool] = st.booleans()
"""On in half."""
USUALLY: SearchStrategy[bool] = st.sampled_from((True, True, True, True, False))
"""Off in a fifth; shrinks to on, which for a bias or the like is the plain case."""

SEEDS: SearchStrategy[int] = st.integers(0, 2**32 - 1)
"""Any seed."""


@cache
def below(count: int) -> SearchStrategy[int]:
    """An index into `count` choices; kept, as building a strategy costs more than drawing from it."""
    return st.integers(0, count - 1)
