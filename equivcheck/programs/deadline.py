"""Time limits for tensor programs."""

from __future__ import annotations

from equivcheck.layouts.composition.running import THREADS
from equivcheck.programs.nouns import TensorProgram
from equivcheck.programs.nouns.operations.families.matmul import WEIGHED
from equivcheck.programs.run.facts import NO_ELEMENTS, facts_of

USUAL_DEADLINE = 30.0
"""Default deadline in campaigns, in seconds."""
PROGRAM_SECONDS = 10.0
"""Program deadline if `check` gets the usual deadline. Programs compute for milliseconds, but DTensor takes up to 2.5 s CPU time
to choose placements for a norm over groups.
"""
SECONDS_WITHOUT_ELEMENTS = 1.0
"""Program deadline if a leaf is empty and ranks are threads. Torch can loop forever in views of empty tensors, which took a
third of the time in sweeps."""


def seconds_of_program(program: TensorProgram, world: str, deadline: float) -> float:
    """Return how many seconds a tensor program may take in this world, if the check's deadline is `deadline`.

    If `deadline` is above the default, the time grows by the same factor. A program with the operation ``attention`` gets the
    full deadline, because DTensor needs ten seconds of CPU time to choose placements for it.
    """
    if WEIGHED in program.operations:
        return deadline
    is_short = world == THREADS and NO_ELEMENTS in facts_of(program)
    usual = SECONDS_WITHOUT_ELEMENTS if is_short else PROGRAM_SECONDS
    return min(deadline, usual * max(1.0, deadline / USUAL_DEADLINE))
