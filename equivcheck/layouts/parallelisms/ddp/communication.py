"""Expected calls for `DistributedDataParallel`: bucketed gradients, the used-parameter map, buffers and rebuilt buckets."""

from __future__ import annotations

from collections import Counter

from equivcheck.layouts.base.dtensor_experts import is_dtensor_expert
from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import ROUTER_BIAS, dispatches_of
from equivcheck.layouts.base.plan.rules import is_outside
from equivcheck.layouts.base.rounding import ITEM_BYTES
from equivcheck.layouts.parallelisms.ddp.buckets import (
    Bucketing,
    ready_parameters,
    rebuilt_buckets,
    reductions,
    trained_parameters,
    unused_parameters,
)
from equivcheck.layouts.parallelisms.pipeline.stages import INFERS_BACKWARD, has_ddp_stages
from equivcheck.scenario import DDP, Compression, Pipeline, TensorParallel
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.worlds.trace.stage import Stage

INT32_BYTES = 4
COUNTER_BYTES = 8
"""Bytes in the buffer that counts forward passes (int64)."""
COMPRESSED_BYTES = 2
"""Bytes in an element of a compressed gradient."""
EMPTY_BUCKET_BYTES = 4
"""Bytes that a rank sends if it has no parameters to update (one float32)."""


def ddp_totals(view: RankView, ddp: DDP, axes: str, *, has_buffers: bool = True) -> Totals:
    """DDP's expected collective calls in all steps, over the group `axes`.

    Set `has_buffers` to False for `replicate`. It broadcasts no buffers because it wraps only parameters.
    """
    ledger = Ledger()
    for span, module in view.modules():
        wrapper = Wrapper(module, ddp, axes, ledger, _buffer_bytes(module, is_last=span.is_last) if has_buffers else [])
        sizes: set[int] = set()
        for step in range(view.training.steps):
            rows = view.training.microbatches_at(step)
            for number, size in enumerate(rows):
                synchronised = number == len(rows) - 1 or not ddp.no_sync
                wrapper.run(step, synchronised=synchronised, is_first=size not in sizes)
                sizes.add(size)
    return ledger.totals


class Wrapper:
    """Predicts the collective calls of one `DistributedDataParallel`, in torch's order."""

    def __init__(self, view: RankView, ddp: DDP, axes: str, ledger: Ledger, buffers: list[int]) -> None:
        """`buffers` has the bytes of the wrapped module's buffers, for each element type."""
        self.view, self.ddp, self.axes, self.ledger = view, ddp, axes, ledger
        self.bucketing = bucketing_of(view, ddp)
        self.reductions = reductions(self.bucketing)
        self.buffers = buffers
        self.num_reduced, self.broadcasts_buffers = 0, True
        self.rebuilt_after = reductions_before_rebuild(ddp)

    def run(self, step: int, *, synchronised: bool, is_first: bool) -> None:
        """Count the calls for one microbatch. `is_first` marks the first one with its number of rows.

        A schedule of a pipeline infers shapes before it. If the schedule recognises the wrapper, it runs chunks in `no_sync()`,
        and reduces in the last backward of each microbatch.
        """
        in_schedule = has_ddp_stages(self.view.layout)
        if is_first and any(not pipeline.static_shapes for pipeline in self.view.layout.of(Pipeline)):
            # Earlier versions infer shapes in `torch.no_grad()`, after which the next forward broadcasts nothing.
            self._forward(step, synchronised=synchronised and is_torch_in(INFERS_BACKWARD))
        self._forward(step, synchronised=synchronised and not in_schedule)
        if synchronised or in_schedule:
            self._reduce(step)

    def _forward(self, step: int, *, synchronised: bool) -> None:
        if self.num_reduced == self.rebuilt_after:
            # Rebuilding buckets broadcasts parameter indices with their number, then bucket sizes.
            num_indices = len(self.bucketing.num_bytes) + 1
            self.ledger.note(step, "broadcast", self.axes, INT32_BYTES * num_indices)
            self.ledger.note(step, "broadcast", self.axes, INT32_BYTES * len(rebuilt_buckets(self.bucketing)))
            self.rebuilt_after = -1
        for num_bytes in self.buffers if self.broadcasts_buffers else ():
            self.ledger.note(step, "broadcast", self.axes, num_bytes)
        self.broadcasts_buffers = synchronised

    def _reduce(self, step: int) -> None:
        reduced, item_bytes = next(self.reductions), self.view.item_bytes
        self.num_reduced += 1
        reduced_bytes = item_bytes if self.ddp.compression is Compression.NONE else COMPRESSED_BYTES
        num_bytes = sum(reduced.buckets) // item_bytes * reduced_bytes
        self.ledger.note(step, "all_reduce.sum", self.axes, num_bytes, len(reduced.buckets))
        if reduced.used_map:
            self.ledger.note(step, "all_reduce.sum", self.axes, reduced.used_map)


def _buffer_bytes(view: RankView, *, is_last: bool) -> list[int]:
    """Return the bytes of a module's buffers, added up for each element type, because DDP broadcasts such buffers together."""
    model = view.training.model
    num_biases = sum(dispatch.num_counted_each_step for dispatch in dispatches_of(view))
    found = Counter({"int64": model.counter * COUNTER_BYTES})
    found[view.training.precision.value] += model.offset * is_last * model.out_features * view.item_bytes
    found[ROUTER_BIAS.value] += num_biases * ITEM_BYTES[ROUTER_BIAS.value]
    return [num_bytes for num_bytes in found.values() if num_bytes]


def reductions_before_rebuild(ddp: DDP) -> int:
    """Number of backward passes with gradient reduction before DDP rebuilds its buckets; -1 if DDP never rebuilds them."""
    if ddp.static_graph:
        return 2
    return -1 if ddp.find_unused_parameters else 1


def bucketing_of(view: RankView, ddp: DDP) -> Bucketing:
    """Return a rank's gradient sizes and options, to predict DDP's buckets from them."""
    names = tuple(held.parameter.full_name for held in view.held if held.trained)
    sizes = {held.parameter.full_name: held.numel * view.item_bytes for held in view.held}
    return Bucketing(
        num_bytes=tuple(sizes[name] for name in names),
        ready=tuple(names.index(name) for name in _ready(view, ddp) if name in names),
        cap_mb=ddp.bucket_cap_mb,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
    )


def _ready(view: RankView, ddp: DDP) -> tuple[str, ...]:
    """Return parameters in the order in which backward completes their gradients.

    Forward first turns former DTensors back into DTensors, one after the other. Such parameters' gradients come after all others,
    in reverse order. Unused parameters are last in any case.
    """
    ready = ready_parameters(view.training.model, autocast=ddp.autocast is not None)
    plans = view.layout.of(TensorParallel)
    localized = {
        found.full_name
        for found in parameters_of(view.training.model)
        if any(not is_outside(plan, found) for plan in plans) or is_dtensor_expert(view.layout, found)
    }
    if not localized:
        return ready
    unused = unused_parameters(view.training.model)
    used = [name for name in ready if name not in unused]
    plain = [name for name in used if name not in localized]
    distributed = [name for name in trained_parameters(view.training.model) if name in used and name in localized]
    return (*plain, *reversed(distributed), *unused)


def _all_calls(view: RankView, ddp: DDP) -> Totals:
    totals = ddp_totals(view, ddp, view.axes(*view.layout.axes_of(ddp)))
    return totals | (update_totals(view, ddp) if ddp.zero_redundancy else {})


def update_totals(view: RankView, ddp: DDP) -> Totals:
    """Expected broadcasts by `ZeroRedundancyOptimizer` in all steps.

    After the update, each rank broadcasts its parameters one by one. With `parameters_as_bucket_view`, it broadcasts them as one
    bucket.
    """
    ledger, names = Ledger(Stage.UPDATE), view.layout.axes_of(ddp)
    if ddp.parameters_as_bucket_view:
        trained = [sum(held.numel for held in part if held.trained) for part in _parts(view, view.layout.mesh.size(*names))]
        sent = [number * view.item_bytes or EMPTY_BUCKET_BYTES for number in trained]
    else:
        sent = [held.numel * view.item_bytes for held in view.held]
    for step in range(view.training.steps):
        ledger.note(step, "broadcast", view.axes(*names), sum(sent), len(sent))
    return ledger.totals


def _parts(view: RankView, num_ranks: int) -> list[list[Held]]:
    """Parameters that each rank updates.

    Groups are sorted by size; each parameter goes to the rank with the fewest elements so far.
    """
    parts: list[list[Held]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for group in _groups(view):
        for held in sorted(group, key=lambda found: found.numel, reverse=True):
            rank = sizes.index(min(sizes))
            parts[rank].append(held)
            sizes[rank] += held.numel
    return parts


def _groups(view: RankView) -> list[list[Held]]:
    from equivcheck.training.update.optimizer import group_of

    training = view.training
    order = {group: number for number, group in enumerate((None, *dict.fromkeys(training.groups)))}
    groups: list[list[Held]] = [[] for _ in order]
    for held in view.held:
        groups[order[group_of(training, held.parameter.full_name)]].append(held)
    return groups


DDP_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
)
