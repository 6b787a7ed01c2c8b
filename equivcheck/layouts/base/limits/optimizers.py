"""Limits for optimizers on DTensors and sharded parameters."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.limit import Limit, UpstreamLimit
from equivcheck.layouts.base.limits.repairs import with_loop
from equivcheck.layouts.base.partition import trained_shardings
from equivcheck.scenario import FSDP2, SGD, Adafactor, AdamW, Implementation, Layout, Muon, Replicate, Replicator, Training


def keeps_dtensors(layout: Layout) -> bool:
    """Whether no parallelism gives the optimizer local tensors to update instead of DTensors.

    Also True if the layout has no DTensors.
    """
    return not any(parallelism.trains_local_tensors for parallelism in layout.parallelisms)


def has_units_of_dtensors(layout: Layout) -> bool:
    """Whether all parameters are DTensors, because the layout uses `fully_shard` or `replicate_with_fsdp`."""
    return layout.has(FSDP2) or any(each.implementation is Replicator.FSDP for each in layout.of(Replicate))


def _with_strategy(training: Training, _layout: Layout) -> Training:
    optimizer = training.optimizer
    left = [each for each in optimizer.implementations() if each not in optimizer.without_dtensor]
    return replace(training, optimizer=replace(optimizer, implementation=left[-1]) if left else SGD(lr=optimizer.lr))


DTENSOR_OPTIMIZERS = (
    UpstreamLimit(
        reason="DTensor: fused SGD, fused Adagrad and Rprop are not supported: operations that they call have no sharding "
        "strategy (aten._fused_sgd_, aten._fused_adagrad_), or none that works in place (aten.index_put_, aten._foreach_copy_)",
        applies=lambda training, layout: (
            training.optimizer.implementation in training.optimizer.without_dtensor and keeps_dtensors(layout)
        ),
        repair=_with_strategy,
    ),
    UpstreamLimit(
        reason="DTensor: foreach Adafactor is not supported: no sharding strategy is registered for "
        "aten._foreach_lerp_.ScalarList",
        applies=lambda training, layout: (
            isinstance(training.optimizer, Adafactor)
            and training.optimizer.implementation is Implementation.FOREACH
            and keeps_dtensors(layout)
        ),
        repair=with_loop,
        torch="<2.13",
    ),
)
"""Limits for every layout with DTensor parameters."""


def with_elementwise_optimizer(training: Training, _layout: Layout) -> Training:
    """Replace the optimizer by AdamW, which is elementwise."""
    optimizer = training.optimizer
    return replace(training, optimizer=AdamW(lr=optimizer.lr, weight_decay=optimizer.weight_decay, maximize=optimizer.maximize))


def is_adafactor_on_shards(training: Training, layout: Layout) -> bool:
    """Whether Adafactor updates sharded DTensors."""
    return isinstance(training.optimizer, Adafactor) and keeps_dtensors(layout) and any(trained_shardings(training, layout))


def is_distributed_muon(training: Training, layout: Layout) -> bool:
    """Whether the optimizer is distributed Muon: one rank updates each matrix in full."""
    return isinstance(training.optimizer, Muon) and any(fsdp.distributed_muon for fsdp in layout.of(FSDP2))


def rounds_shards(training: Training, layout: Layout) -> bool:
    """Whether the optimizer rounds a matrix to a lower precision, and ranks hold different parts of the matrix.

    If each rank has the full matrix, all ranks round in the same way.
    """
    if not training.optimizer.rounds_to or is_distributed_muon(training, layout):
        return False
    return any(cut.ranks > 1 for cut in trained_shardings(training, layout, least_dims=2))


def _is_muon_of_short_dims(training: Training, layout: Layout) -> bool:
    is_muon = isinstance(training.optimizer, Muon) and keeps_dtensors(layout) and not is_distributed_muon(training, layout)
    return is_muon and any(cut.size < cut.ranks for cut in trained_shardings(training, layout, least_dims=2))


def _sees_local_parts(training: Training, layout: Layout) -> bool:
    sees = not training.optimizer.elementwise and not keeps_dtensors(layout)
    return sees and any(cut.ranks > 1 for cut in trained_shardings(training, layout, least_dims=2))


WHOLE_PARAMETERS = (
    UpstreamLimit(
        reason="DTensor: Adafactor on sharded parameters is not supported: it squares norms in place, and DTensor refuses this "
        "for partial norms; for vectors it uses the norm of the local shard, because DTensor.item() does not reduce "
        "(pytorch#144054)",
        applies=is_adafactor_on_shards,
        repair=with_elementwise_optimizer,
    ),
    UpstreamLimit(
        reason="DTensor: Muon with a sharded dim shorter than the number of ranks is not supported: its "
        "matrix products lose that sharding, and DTensor refuses to change placements in place",
        applies=_is_muon_of_short_dims,
        repair=with_elementwise_optimizer,
    ),
    Limit(
        reason="data parallelism over tensor parallelism: an optimizer that is not elementwise is not supported: sharded "
        "parameters are trained as plain local tensors, so it never sees a full one",
        applies=_sees_local_parts,
        repair=with_elementwise_optimizer,
    ),
)
"""Limits for every layout that shards parameters."""
