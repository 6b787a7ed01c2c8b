"""Recognizes errors that clearly refuse the input placements."""

from __future__ import annotations

import re

from equivcheck.programs.run.refusals import LONGEST, refusal

OF_LOCAL_MAP = r"local_map.*(mismatched placements|redistribute_inputs)"
"""Pattern for `local_map` errors about placements it was not built for."""


def refusal_of(error: BaseException, also: str) -> str | None:
    """The error in one line if DTensor or `local_map` refuses clearly, or the pattern `also` is found; else None."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if re.search(OF_LOCAL_MAP, text) or (also and re.search(also, text)):
        return text[:LONGEST]
    return refusal(error)
