"""All counterfactuals, the more telling ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.oracle.diagnosis.case import Case
from equivcheck.oracle.diagnosis.counterfactual import Counterfactual
from equivcheck.oracle.diagnosis.reduction import wrong_reductions

CATALOGUE: tuple[Callable[[Case], Iterator[Counterfactual]], ...] = (wrong_reductions,)
"""Each gives what may explain a case; where several do, the first is told."""


def counterfactuals(case: Case) -> Iterator[Counterfactual]:
    """What is tried on a case, in order."""
    for wrong in CATALOGUE:
        yield from wrong(case)
