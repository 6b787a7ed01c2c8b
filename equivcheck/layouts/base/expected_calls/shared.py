"""Expected calls that several parallelisms share: clipping, explicit gradient reductions, and counts for routers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.expected_calls.torch_versions import LARGEST_NORM_FIRST, SUM_OF_NORMS_FIRST
from equivcheck.layouts.base.partition import local_shape, shard_dim
from equivcheck.layouts.base.rounding import ITEM_BYTES
from equivcheck.scenario import ClipNorm, ElementType, ExpertParallel, NormType, PlannedParallelism, ZeroGrad
from equivcheck.scenario.mesh import CP, DP, EP, REPLICATE, SHARD
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.facts import Dispatch
from equivcheck.training.layers.registry import layer_kind
from equivcheck.worlds.trace.stage import Stage


def dtensor_clipping(view: RankView, axes: Iterable[str], kind: Iterable[Held], *, flattened: bool = False) -> Totals:
    """Expected collective calls in all steps to clip the gradients of the DTensors in `kind`, which are parameters.

    `axes` are the mesh axes along which any of these gradients is sharded. torch stacks all gradients' norms into one tensor and
    reduces it over one axis after another, or once if the axes are `flattened` into one. Some torch versions combine the norms
    before they reduce. If no gradient exists, nothing is reduced.
    """
    clipping, ledger = view.training.clipping, Ledger(Stage.CLIPPING)
    if not isinstance(clipping, ClipNorm):
        return {}
    parameters = tuple(kind)
    op, combined = ("max", LARGEST_NORM_FIRST) if clipping.norm_type is NormType.INF else ("sum", SUM_OF_NORMS_FIRST)
    cut_along = [name for name in axes if view.layout.mesh.size(name) > 1]
    groups = [view.axes(*cut_along)] if flattened and cut_along else [view.axes(name) for name in cut_along]
    for step in range(view.training.steps):
        num_norms = sum(held.counts_in_norm and has_kept_gradient(view, held, step) for held in parameters)
        for group in groups if num_norms else ():
            ledger.note(step, f"all_reduce.{op}", group, (1 if is_torch_in(combined) else num_norms) * view.item_bytes)
    return ledger.totals


def sharded_clipping(view: RankView, axis: str, parts: Iterable[Held]) -> Totals:
    """Expected collective calls in all steps for clipping the plain tensors in `parts`, sharded along `axis`.

    One norm is computed for all tensors sharded along the same axes. Each step all-reduces each such norm.
    """
    clipping, ledger, cut = view.training.clipping, Ledger(Stage.CLIPPING), tuple(parts)
    if not isinstance(clipping, ClipNorm) or view.layout.mesh.size(axis) == 1:
        return {}
    op = "max" if clipping.norm_type is NormType.INF else "sum"
    for step in range(view.training.steps):
        kinds = {sharding_axes(view, held) for held in cut if held.counts_in_norm and has_kept_gradient(view, held, step)}
        if kinds:
            ledger.note(step, f"all_reduce.{op}", view.axes(axis), len(kinds) * view.item_bytes, len(kinds))
    return ledger.totals


def one_norm(view: RankView, axes: str, num_bytes: int) -> Totals:
    """Expected collective calls if each step's clipping all-reduces one norm of `num_bytes` bytes over the group `axes`."""
    clipping, ledger = view.training.clipping, Ledger(Stage.CLIPPING)
    if isinstance(clipping, ClipNorm):
        op = "all_reduce.max" if clipping.norm_type is NormType.INF else "all_reduce.sum"
        for step in range(view.training.steps):
            ledger.note(step, op, axes, num_bytes)
    return ledger.totals


def sharding_axes(view: RankView, held: Held) -> tuple[str, ...]:
    """Mesh axes over which a parameter is sharded as plain local tensors."""
    cutting = view.layout.of(PlannedParallelism, ExpertParallel)
    axes = (view.layout.axes_of(each)[-1] for each in cutting if shard_dim(each, held.parameter) is not None)
    return tuple(axis for axis in axes if view.layout.mesh.size(axis) > 1)


def has_kept_gradient(view: RankView, held: Held, step: int) -> bool:
    """Whether a parameter has a gradient after a step's backward.

    With `zero_grad(set_to_none=False)`, a gradient from an earlier step still exists as zeros.
    """
    steps = range(step + 1) if view.training.zero_grad is ZeroGrad.ZERO else (step,)
    return any(view.has_gradient(held, before) for before in steps)


def gradient_reductions(view: RankView, axis: str, kind: Iterable[Held], *, flat: bool = False) -> Totals:
    """Expected collective calls in all steps to sum the gradients of the parameters in `kind` over an axis.

    There is one all-reduce for each gradient, or one for all gradients together if `flat`. A rank makes no call for an empty
    local gradient.
    """
    ledger, parameters = Ledger(), tuple(kind)
    for step in range(view.training.steps):
        sizes = list(_sizes(view, parameters, step))
        for size in [sum(sizes)] if flat and sizes else sizes:
            ledger.note(step, "all_reduce.sum", view.axes(axis), size * view.item_bytes)
    return ledger.totals


def _sizes(view: RankView, parameters: Iterable[Held], step: int) -> Iterator[int]:
    """Return the number of local elements of each gradient under all parallelisms in the layout."""
    coordinates = dict(zip(view.layout.mesh.names, view.coordinate, strict=True))
    for held in parameters:
        size = math.prod(local_shape(view.layout, held.parameter, coordinates))
        if size and has_kept_gradient(view, held, step):
            yield size


ROUTER_BIAS = ElementType.FLOAT32
"""Element type of a router's bias and its counts, whatever the training's precision."""
AXES = (DP, REPLICATE, SHARD, EP, CP)
"""Mesh axes whose ranks have different rows or positions."""


def dispatches_of(view: RankView) -> list[Dispatch]:
    """Return how the layers whose parameters are on the rank send rows to experts, without layers that send none."""
    own = {held.layer for held in view.held}
    layers = (layer for index, layer in enumerate(view.training.model.layers) if index in own)
    found = (layer_kind(layer).dispatch(layer) for layer in layers)
    return [dispatch for dispatch in found if dispatch is not None]


def _sequence_counts(view: RankView, dispatches: Iterable[Dispatch], rows: int) -> list[int]:
    """Bytes for each layer's counts, from a rank's sequences in a microbatch with `rows` rows."""
    num_sequences = rows // view.layout.num_data_ranks
    return [each.num_counted_each_sequence * num_sequences * view.item_bytes for each in dispatches]


def count_reductions(view: RankView) -> Totals:
    """Expected collective calls in all steps to sum layers' counts, such as tokens per expert.

    For a load-balancing loss, there is one all-reduce for each axis, microbatch and layer with counts. A loss for each sequence
    needs it only along an axis that splits sequences. For a router's bias, there is one for each axis, step and layer. Only
    layers whose parameters are on the rank count.
    """
    ledger, dispatches = Ledger(), dispatches_of(view)
    for axis in AXES if dispatches else ():
        for step in range(view.training.steps if view.layout.mesh.size(axis) > 1 else 0):
            microbatches = view.training.microbatches_at(step)
            sizes = [each.num_counted * view.item_bytes for each in dispatches] * len(microbatches)
            if axis == CP:
                sizes += [size for rows in microbatches for size in _sequence_counts(view, dispatches, rows)]
            sizes += [each.num_counted_each_step * ITEM_BYTES[ROUTER_BIAS.value] for each in dispatches]
            if any(sizes):
                ledger.note(step, "all_reduce.sum", view.axes(axis), sum(sizes), sum(map(bool, sizes)))
    return ledger.totals
