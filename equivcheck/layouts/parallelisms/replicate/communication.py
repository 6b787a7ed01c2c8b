"""Expected calls for composable `replicate`: those of `DistributedDataParallel`, or of `fully_shard` without sharding."""

from __future__ import annotations

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import OPTIMIZER_NOT_ELEMENTWISE, CommunicationModel, Unpredicted
from equivcheck.layouts.base.expected_calls.rank_view import Ledger, RankView
from equivcheck.layouts.parallelisms.ddp.communication import ddp_totals
from equivcheck.layouts.parallelisms.fsdp2.communication import reduce_op
from equivcheck.layouts.parallelisms.fsdp2.units import units_of
from equivcheck.layouts.parallelisms.pipeline.communication import num_fsdp_reductions
from equivcheck.scenario import DDP, Layout, Replicate, Replicator, Training


def _all_calls(view: RankView, replicate: Replicate) -> Totals:
    if replicate.implementation is Replicator.DDP:
        ddp = DDP(bucket_cap_mb=replicate.bucket_cap_mb, no_sync=replicate.no_sync, compression=replicate.compression)
        return ddp_totals(view, ddp, view.axes(*view.layout.axes_of(replicate)), has_buffers=False)
    return _fsdp_totals(view, replicate)


def _fsdp_totals(view: RankView, replicate: Replicate) -> Totals:
    """Count the calls in all steps. Only gradients are reduced, unit by unit."""
    ledger = Ledger()
    axes, op = view.axes(*view.layout.axes_of(replicate)), f"all_reduce.{reduce_op(view)}"
    units = [unit for _, module in view.modules() for unit in units_of(module, replicate.wrapping)]
    for step in range(view.training.steps):
        times = num_fsdp_reductions(view, step, no_sync=replicate.no_sync)
        for unit in units:
            num_elements = sum(held.numel for held in unit.held if view.has_gradient(held, step))
            if num_elements:
                ledger.note(step, op, axes, num_elements * view.item_bytes * times, times)
    return ledger.totals


def _mixes_elements(training: Training, layout: Layout) -> bool:
    has_dtensors = any(one.implementation is Replicator.FSDP for one in layout.of(Replicate))
    return has_dtensors and OPTIMIZER_NOT_ELEMENTWISE.applies(training, layout)


REPLICATE_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    unmodelled=(Unpredicted(reason=OPTIMIZER_NOT_ELEMENTWISE.reason, applies=_mixes_elements),),
)
