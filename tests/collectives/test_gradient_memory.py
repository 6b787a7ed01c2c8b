"""How tensors lie in memory changes no gradient in sim: it is the adjoint, or the call is refused, as gloo may get it wrong."""

from __future__ import annotations

import pytest

from collectives.gradient_memory import Memories, Memory, Side, is_allowed
from collectives.gradient_programs import differentiate_or_raise
from collectives.gradients import ALLOWED, COMBINATIONS, Form, allowed
from collectives.memory_differences import MEMORY_DIFFERENCES, MemoryDifference
from collectives.test_gradients import assert_differentiated
from collectives.worlds import run_in
from equivcheck.worlds.failure import RanksFailed

WAYS: tuple[Memories, ...] = (
    (Memory.REVERSED, Memory.REVERSED),
    (Memory.ROWS, Memory.REVERSED),
    (Memory.GAPS, Memory.GAPS),
    (Memory.EXPANDED, Memory.EXPANDED),
)
by_name = pytest.mark.parametrize("difference", MEMORY_DIFFERENCES, ids=lambda difference: difference.name)


@by_name
def test_sim_refuses_what_gloo_gets_wrong(difference: MemoryDifference) -> None:
    """It says why, before there is any number."""
    with pytest.raises(RanksFailed, match=difference.refusal):
        run_in("sim", 2, differentiate_or_raise, difference.derivative)


@by_name
def test_gloo_gets_them_wrong_or_refuses_them(difference: MemoryDifference) -> None:
    """Values or gradients of some rank are not the model's; if they are, torch has mended it."""
    if difference.error:
        with pytest.raises(RanksFailed, match=difference.error):
            run_in("gloo", 2, differentiate_or_raise, difference.derivative)
        return
    pairs = run_in("gloo", 2, differentiate_or_raise, difference.derivative)
    with pytest.raises(AssertionError):
        assert_differentiated(difference.derivative, pairs)


def test_what_is_not_drawn_is_on_file() -> None:
    """Each way to lie in memory that the property leaves out is in the table, and nothing that it draws is."""
    undrawn = {
        (kind, side, way)
        for side in Side
        for form, kind in COMBINATIONS
        for way in WAYS
        if form is Form.NN and not is_allowed(allowed(side, form, kind), way) and (side, Memory.EXPANDED) != (Side.INPUTS, way[0])
    }
    assert undrawn == {(row.kind, row.side, row.memories) for row in MEMORY_DIFFERENCES}
    assert {form for table in ALLOWED.values() for form, _ in table} == {Form.NN}
