"""Which tensors may be what is wrong: those that differ first, or all."""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.diagnosis.case import Case
from equivcheck.trace.differences import Phase


def suspects(case: Case) -> Iterator[tuple[str, ...]]:
    """Sets of parameters whose gradients may be wrong, the smallest first."""
    everything = case.updated
    differing = tuple(name for name in case.differing(Phase.GRADIENT) if name in everything)
    if differing:
        yield differing
    if set(differing) != set(everything):
        yield everything
