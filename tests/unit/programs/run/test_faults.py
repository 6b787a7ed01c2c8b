"""Faults planted in operations on ranks."""

from __future__ import annotations

import pytest

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.programs.check import check_program
from equivcheck.programs.nouns import Leaf, Operation, Redistribution, TensorProgram
from equivcheck.programs.run.faults import FAULTS
from equivcheck.worlds.trace.differences import Phase
from support.verdicts import first_divergence


def program(placement: str, *statements: Operation | Redistribution) -> TensorProgram:
    """Statements on a leaf of 4 x 6."""
    return TensorProgram(mesh=(2,), statements=(Leaf(shape=(4, 6), placements=(placement,)), *statements))


SMALLEST_PROGRAMS = {
    "doubled_backward": (program("S(0)", Redistribution(placements=("R",))), Phase.GRADIENT),
    "dropped_all_reduce": (program("P(sum)", Redistribution(placements=("R",))), Phase.VALUE),
    "whole_addends": (program("P(sum)"), Phase.VALUE),
    "swapped_rows": (program("S(0)", Redistribution(placements=("S(1)",))), Phase.VALUE),
    "elementwise_rule": (program("S(0)", Operation(name="softmax")), Phase.VALUE),
    "missing_conversion": (program("P(sum)", Operation(name="exp")), Phase.VALUE),
}


def test_every_fault_has_a_program() -> None:
    """No fault is missing below."""
    assert SMALLEST_PROGRAMS.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", SMALLEST_PROGRAMS)
def test_a_fault_is_caught_where_it_shows(name: str) -> None:
    """Without the fault the program is right; with it, the program diverges in the fault's phase."""
    shown_by, phase = SMALLEST_PROGRAMS[name]
    assert check_program(shown_by).outcome is Outcome.EQUIVALENT
    assert first_divergence(check_program(shown_by, target=FAULTS[name])).phase is phase
