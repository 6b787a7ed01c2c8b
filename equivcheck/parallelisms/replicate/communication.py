"""What composable `replicate` communicates: as a `DistributedDataParallel`, or as `fully_shard` whose shards are whole."""

from __future__ import annotations

from equivcheck.layouts.expected_calls.communication import Totals
from equivcheck.layouts.expected_calls.model import MIXED_ELEMENTS, Foresight, Gap
from equivcheck.layouts.expected_calls.rank_view import Ledger, RankView
from equivcheck.parallelisms.ddp.communication import ddp_totals
from equivcheck.parallelisms.fsdp2.communication import reduce_op, units_of
from equivcheck.scenario import DDP, Layout, Replicate, Replicator, Training


def _all_calls(seat: RankView, replicate: Replicate) -> Totals:
    if replicate.implementation is Replicator.DDP:
        ddp = DDP(bucket_cap_mb=replicate.bucket_cap_mb, no_sync=replicate.no_sync, compression=replicate.compression)
        return ddp_totals(seat, ddp, seat.axes(*seat.layout.axes_of(replicate)), has_buffers=False)
    return _fsdp_totals(seat, replicate)


def _fsdp_totals(seat: RankView, replicate: Replicate) -> Totals:
    """Gradients alone, unit by unit."""
    ledger, units = Ledger(), units_of(seat, replicate.wrapping)
    axes, op = seat.axes(*seat.layout.axes_of(replicate)), f"all_reduce.{reduce_op(seat, seat.training.precision.value)}"
    times = 1 if replicate.no_sync else len(seat.training.data.microbatches)
    for step in range(seat.training.steps):
        for unit in units:
            num_elements = sum(held.numel for held in unit.held if seat.has_gradient(held, step))
            if num_elements:
                ledger.note(step, op, axes, num_elements * seat.item_bytes * times, times)
    return ledger.totals


def _mixes_elements(training: Training, layout: Layout) -> bool:
    has_dtensors = any(one.implementation is Replicator.FSDP for one in layout.of(Replicate))
    return has_dtensors and MIXED_ELEMENTS.applies(training, layout)


REPLICATE_FORESIGHT = Foresight(
    options=frozenset(("implementation", "bucket_cap_mb", "wrapping", "no_sync", "compression")),
    calls=_all_calls,
    gaps=(Gap(reason=MIXED_ELEMENTS.reason, applies=_mixes_elements),),
)
