"""Everything that DTensor is known to do wrong in tensor programs."""

from __future__ import annotations

from equivcheck.program_run.known import KNOWN, KnownDifference
from equivcheck.program_run.known_errors import KNOWN_ERRORS
from equivcheck.tensor_program.program import TensorProgram
from equivcheck.verdict.verdict import Judgement

ON_FILE = (*KNOWN, *KNOWN_ERRORS)
"""Silent differences, then errors."""


def known_difference(program: TensorProgram, verdict: Judgement) -> KnownDifference | None:
    """The entry that explains what a verdict found, if there is one."""
    if not verdict.outcome.is_finding:
        return None
    return next((each for each in ON_FILE if each.explains(program, verdict)), None)
