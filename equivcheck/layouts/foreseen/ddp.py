"""What `DistributedDataParallel` communicates: gradients in buckets, a map of used parameters, buffers, its plan of buckets."""

from __future__ import annotations

from equivcheck.layouts.buckets import Bucketing, ready_parameters, rebuilt_buckets, reductions, trained_parameters
from equivcheck.layouts.communication import Totals
from equivcheck.layouts.foreseen.foresight import Foresight
from equivcheck.layouts.foreseen.seat import Ledger, Seat
from equivcheck.layouts.foreseen.zero_redundancy import update_totals
from equivcheck.scenario import DDP

INT32_BYTES = 4
COUNTER_BYTES = 8
"""Of the buffer that a model may have: one int64."""


def ddp_totals(seat: Seat, ddp: DDP) -> Totals:
    """The calls of all steps."""
    ledger, training = Ledger(), seat.training
    axes = seat.axes(*seat.layout.axes_of(ddp))
    bucketing = bucketing_of(seat, ddp)
    expected = reductions(bucketing)
    num_reduced, synchronised = 0, True
    last = len(training.data.microbatches) - 1
    rebuilt_after = rebuilding(ddp)
    for step in range(training.steps):
        for number in range(last + 1):
            if num_reduced == rebuilt_after:
                _note_rebuilt(ledger, step, axes, bucketing)
                rebuilt_after = -1
            if synchronised and training.model.counter:
                ledger.note(step, "broadcast", axes, COUNTER_BYTES)
            synchronised = number == last or not ddp.no_sync
            if synchronised:
                reduced = next(expected)
                num_reduced += 1
                ledger.note(step, "all_reduce.sum", axes, sum(reduced.buckets), len(reduced.buckets))
                if reduced.used_map:
                    ledger.note(step, "all_reduce.sum", axes, reduced.used_map)
    return ledger.totals


def rebuilding(ddp: DDP) -> int:
    """After how many reductions the buckets are rebuilt; -1 for never."""
    if ddp.static_graph:
        return 2
    return -1 if ddp.find_unused_parameters else 1


def bucketing_of(seat: Seat, ddp: DDP) -> Bucketing:
    """What decides about the buckets of a rank."""
    model = seat.training.model
    names = trained_parameters(model)
    sizes = {f"layers.{held.layer}.{held.name}": held.numel * seat.item_bytes for held in seat.held}
    return Bucketing(
        num_bytes=tuple(sizes[name] for name in names),
        ready=tuple(map(names.index, ready_parameters(model))),
        cap_mb=ddp.bucket_cap_mb,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
    )


def _note_rebuilt(ledger: Ledger, step: int, axes: str, bucketing: Bucketing) -> None:
    """The first rank tells the others which gradient goes into which bucket: their indices and number, and how many each has."""
    num_indices = len(bucketing.num_bytes) + 1
    ledger.note(step, "broadcast", axes, INT32_BYTES * num_indices)
    ledger.note(step, "broadcast", axes, INT32_BYTES * len(rebuilt_buckets(bucketing)))


def _all_calls(seat: Seat, ddp: DDP) -> Totals:
    return ddp_totals(seat, ddp) | (update_totals(seat, ddp) if ddp.zero_redundancy else {})


DDP_FORESIGHT = Foresight(
    options=frozenset(
        (
            "bucket_cap_mb",
            "gradient_as_bucket_view",
            "static_graph",
            "find_unused_parameters",
            "no_sync",
            "zero_redundancy",
            "parameters_as_bucket_view",
        )
    ),
    calls=_all_calls,
)
