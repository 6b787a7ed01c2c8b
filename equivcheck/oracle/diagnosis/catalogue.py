"""All counterfactuals, the more telling ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.oracle.diagnosis.accumulation import wrong_accumulations
from equivcheck.oracle.diagnosis.case import Case
from equivcheck.oracle.diagnosis.clipping import wrong_clippings
from equivcheck.oracle.diagnosis.counterfactual import Counterfactual
from equivcheck.oracle.diagnosis.optimizer import wrong_optimizers
from equivcheck.oracle.diagnosis.order import wrong_orders
from equivcheck.oracle.diagnosis.precision import wrong_masters, wrong_reduction_precision
from equivcheck.oracle.diagnosis.reduction import wrong_factors, wrong_reductions
from equivcheck.oracle.diagnosis.rows import wrong_rows, wrong_starts
from equivcheck.oracle.diagnosis.scaled import constant_ratios
from equivcheck.oracle.diagnosis.shards import local_statistics, wrong_shards
from equivcheck.oracle.diagnosis.state import stale_values, wrong_updates
from equivcheck.oracle.diagnosis.tensor_parallel import wrong_splits
from equivcheck.oracle.diagnosis.ties import wrong_ties
from equivcheck.trace.differences import Phase

_COMPUTED = (Phase.LOSS, Phase.GRADIENT)
_UPDATED = (Phase.UPDATE, Phase.STATE)

CATALOGUE: tuple[tuple[Callable[[Case], Iterator[Counterfactual]], tuple[Phase, ...]], ...] = (
    (wrong_starts, (*_COMPUTED, *_UPDATED, Phase.BUFFER)),
    (wrong_reductions, _COMPUTED),
    (wrong_splits, _COMPUTED),
    (wrong_orders, _COMPUTED),
    (wrong_shards, _COMPUTED),
    (wrong_factors, _COMPUTED),
    (wrong_rows, _COMPUTED),
    (wrong_accumulations, _COMPUTED),
    (wrong_clippings, (Phase.GRADIENT, Phase.CLIPPING)),
    (wrong_reduction_precision, _COMPUTED),
    (wrong_ties, _COMPUTED),
    (constant_ratios, (*_COMPUTED, Phase.CLIPPING)),
    (stale_values, (*_COMPUTED, *_UPDATED)),
    (wrong_masters, (*_COMPUTED, *_UPDATED)),
    (local_statistics, _UPDATED),
    (wrong_updates, _UPDATED),
    (wrong_optimizers, _UPDATED),
)
"""Each gives what may explain a case that differs first in one of some phases; where several do, the first is told."""


def counterfactuals(case: Case) -> Iterator[Counterfactual]:
    """What is tried on a case, in order."""
    for wrong, phases in CATALOGUE:
        if case.first.phase in phases:
            yield from wrong(case)
