"""Time limits for the ranks of a tensor program."""

from __future__ import annotations

from equivcheck.layouts.composition.running import THREADS
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.nouns.operations.matmul import WEIGHED
from equivcheck.programs.run.facts import NO_ELEMENTS, facts_of

USUAL_DEADLINE = 30.0
"""Default deadline of a campaign's checks, in seconds."""
PROGRAM_SECONDS = 10.0
"""Deadline of a program if cases have the usual one. Programs compute for milliseconds, but DTensor takes up to 2.5 s of CPU
time to choose placements for a norm of groups."""
SECONDS_WITHOUT_ELEMENTS = 1.0
"""Deadline if a leaf has no elements and ranks are threads. For views of such tensors torch can loop forever, which took a
third of a sweep."""


def seconds_of_program(program: TensorProgram, world: str, deadline: float) -> float:
    """Deadline of a program in a check with `deadline`. It grows if cases get more than the usual time.

    A program with `WEIGHED` keeps the full deadline, because DTensor needs ten seconds of CPU time to choose its placements.
    """
    if WEIGHED in program.operations:
        return deadline
    is_short = world == THREADS and NO_ELEMENTS in facts_of(program)
    usual = SECONDS_WITHOUT_ELEMENTS if is_short else PROGRAM_SECONDS
    return min(deadline, usual * max(1.0, deadline / USUAL_DEADLINE))
