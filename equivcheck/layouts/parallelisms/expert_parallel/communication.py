"""Expected calls for expert parallelism: all-to-alls of rows, and replicated parameters' gradient reductions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from equivcheck.layouts.base.dtensor_experts import shards_over_ep
from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.expected_calls.passes import Passes
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import dtensor_clipping, gradient_reductions, sharded_clipping
from equivcheck.layouts.base.partition import shard_dim, shard_shape
from equivcheck.scenario import ExpertParallel, ExpertStorage
from equivcheck.scenario.mesh import EP
from equivcheck.training.layers.registry import layer_kind

FORWARD = 3
"""Number of all-to-alls in a layer's forward: row counts for each expert, rows to experts, and outputs back."""


def _all_calls(view: RankView, parallelism: ExpertParallel) -> Totals:
    ledger = Ledger()
    for step in range(view.training.steps):
        exchanges = (
            _exchanges(view, passes, index) * passes.times for passes in view.passes_at(step) for index in passes.span.layers
        )
        num_exchanges = sum(exchanges)
        if num_exchanges:
            ledger.note(step, "all_to_all", view.axes(EP), 0, num_exchanges)
    whole = [held for held in view.held if shard_dim(parallelism, held.parameter) is None]
    experts = [held for held in view.held if shard_dim(parallelism, held.parameter) is not None]
    reductions = {} if shards_over_ep(view.layout) else gradient_reductions(view, EP, whole)
    return ledger.totals | reductions | _clipping(view, parallelism, experts)


def _clipping(view: RankView, parallelism: ExpertParallel, experts: list[Held]) -> Totals:
    if parallelism.storage is ExpertStorage.PLAIN:
        return sharded_clipping(view, EP, experts)
    return dtensor_clipping(view, (EP,), experts)


def _exchanges(view: RankView, passes: Passes, index: int) -> int:
    """Count a layer's all-to-alls in one pass. Backward returns the gradients that rows and outputs need."""
    layer = view.training.model.layers[index]
    dispatch = layer_kind(layer).dispatch(layer)
    if dispatch is None:
        return 0
    trains_rows = (not passes.infers and dispatch.trains_rows) or view.is_differentiated(index - 1, passes)
    trains = trains_rows or (not passes.infers and not layer.frozen)
    forwards = 1 + (trains and view.layout.execution.checkpoints(index))
    return FORWARD * forwards + trains + trains_rows


def _held(view: RankView, parallelism: ExpertParallel) -> Iterator[Held]:
    """Yield parameters, with this rank's expert shards."""
    ranks = view.layout.mesh.size(EP)
    for held in view.held:
        dim = shard_dim(parallelism, held.parameter)
        if dim is None or ranks == 1:
            yield held
        else:
            yield replace(held, shape=shard_shape(held.shape, dim, ranks, view.index(EP)), cut=True)


EXPERT_PARALLEL_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    hold=lambda view, parallelism: tuple(_held(view, parallelism)),
    open_bytes=frozenset(("all_to_all",)),
    uneven=lambda _parallelism: True,
    sends_shards=True,
)
