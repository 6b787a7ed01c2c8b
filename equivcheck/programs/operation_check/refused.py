"""Which errors of an operation say clearly that it does not take its inputs so."""

from __future__ import annotations

import re

from equivcheck.programs.run.refusals import LONGEST, refusal

OF_LOCAL_MAP = r"local_map.*(mismatched placements|redistribute_inputs)"
"""What `local_map` says of placements that it is not for."""


def refusal_of(error: BaseException, also: str) -> str | None:
    """What an error says, in one line, if it is a clear refusal: by DTensor, by `local_map`, or in words that a user named."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if re.search(OF_LOCAL_MAP, text) or (also and re.search(also, text)):
        return text[:LONGEST]
    return refusal(error)
