"""What one step consumes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import Data
from equivcheck.scenario.data import MAX_MICROBATCHES
from equivcheck.strategies.chance import EVENLY

ROWS: SearchStrategy[int] = st.integers(1, 4)

_BATCH_DIMS = st.sampled_from((0, 0, 0, 1))
_COUNTS = st.sampled_from((1, 1, 2, 2, 3, 4))


@st.composite
def data(draw: DrawFn, *, rows: SearchStrategy[int] = ROWS, max_microbatches: int = MAX_MICROBATCHES) -> Data:
    """Data of 1 to `max_microbatches` microbatches, of equal rows or not; a quarter has its rows along dim 1."""
    num_microbatches, batch_dim = min(draw(_COUNTS), max_microbatches), draw(_BATCH_DIMS)
    if num_microbatches > 1 and draw(EVENLY):
        return Data(microbatches=tuple(draw(rows) for _ in range(num_microbatches)), batch_dim=batch_dim)
    return Data(microbatches=(draw(rows),) * num_microbatches, batch_dim=batch_dim)
