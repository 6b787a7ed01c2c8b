"""All counterfactuals, the more telling ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.diagnosis.accumulation import wrong_accumulations
from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.clipping import wrong_clippings
from equivcheck.diagnosis.counterfactual import Counterfactual
from equivcheck.diagnosis.optimizer import wrong_optimizers
from equivcheck.diagnosis.order import wrong_orders
from equivcheck.diagnosis.precision import wrong_masters, wrong_reduction_precision
from equivcheck.diagnosis.reduction import wrong_factors, wrong_reductions
from equivcheck.diagnosis.rows import wrong_rows, wrong_starts
from equivcheck.diagnosis.scaled import constant_ratios
from equivcheck.diagnosis.shards import local_statistics, wrong_shards
from equivcheck.diagnosis.state import stale_values, wrong_updates
from equivcheck.diagnosis.tensor_parallel import wrong_splits
from equivcheck.diagnosis.ties import wrong_ties
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
