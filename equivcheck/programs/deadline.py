"""How long the ranks of a tensor program may take."""

from __future__ import annotations

from equivcheck.layouts.composition.running import THREADS
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.nouns.operations.matmul import WEIGHED
from equivcheck.programs.run.facts import NO_ELEMENTS, facts_of

USUAL_DEADLINE = 30.0
"""Seconds: the deadline of a campaign's checks, unless another is asked for."""
PROGRAM_SECONDS = 10.0
"""A deadline for programs, which compute for milliseconds, where cases have the usual one.

DTensor weighs placements of a norm by groups for up to 2.5 s of CPU time on a slow machine.
"""
SECONDS_WITHOUT_ELEMENTS = 1.0
"""And where a leaf has no elements, and ranks are threads.

Torch computes of the views of some without an end, which took a third of a sweep.
"""


def seconds_of_program(program: TensorProgram, world: str, deadline: float) -> float:
    """A deadline of programs: longer where cases have longer than usual, as those that are checked again with more time.

    One that DTensor takes ten seconds of CPU time for has as long as any case.
    """
    if WEIGHED in program.operations:
        return deadline
    is_short = world == THREADS and NO_ELEMENTS in facts_of(program)
    usual = SECONDS_WITHOUT_ELEMENTS if is_short else PROGRAM_SECONDS
    return min(deadline, usual * max(1.0, deadline / USUAL_DEADLINE))
