"""Expected calls for counting how often routers choose each expert in a whole microbatch."""

from __future__ import annotations

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Ledger, RankView
from equivcheck.scenario.mesh import CP, DP, EP, REPLICATE, SHARD
from equivcheck.training.layers.registry import kind_of

AXES = (DP, REPLICATE, SHARD, EP, CP)
"""Ranks along these mesh axes have different rows or positions."""


def sums_of_counts(view: RankView) -> Totals:
    """Calls in all steps: in each microbatch, one all-reduce over each axis for each counting layer."""
    ledger, dispatches = Ledger(), [kind_of(layer).dispatch(layer) for layer in view.training.model.layers]
    sizes = [dispatch.num_counted for dispatch in dispatches if dispatch is not None and dispatch.num_counted]
    num_microbatches = len(view.training.data.microbatches)
    for axis in AXES if sizes else ():
        for step in range(view.training.steps if view.layout.mesh.size(axis) > 1 else 0):
            num_bytes = sum(sizes) * view.item_bytes * num_microbatches
            ledger.note(step, "all_reduce.sum", view.axes(axis), num_bytes, len(sizes) * num_microbatches)
    return ledger.totals
