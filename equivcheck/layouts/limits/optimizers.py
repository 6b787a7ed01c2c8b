"""What optimizers cannot run on: DTensors, cut parameters, an older torch."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from packaging.version import Version

from equivcheck.layouts.limits.limit import Limit
from equivcheck.layouts.partition import matrix_cuts
from equivcheck.scenario import (
    DDP,
    FSDP1,
    SGD,
    Adafactor,
    Adagrad,
    AdamW,
    Implementation,
    Layout,
    Muon,
    Parallelism,
    Replicate,
    Replicator,
    Rprop,
    Training,
)


def _localizes(parallelism: Parallelism) -> bool:
    """Whether it trains the local tensors of DTensors in their place, so that an optimizer sees plain tensors only."""
    if isinstance(parallelism, Replicate):
        return parallelism.implementation is Replicator.DDP
    return isinstance(parallelism, (DDP, FSDP1))


def keeps_dtensors(layout: Layout) -> bool:
    """Whether an optimizer sees the DTensors of a layout that has such."""
    return not any(map(_localizes, layout.parallelisms))


def _is_fused_sgd(training: Training, layout: Layout) -> bool:
    optimizer = training.optimizer
    is_fused = isinstance(optimizer, (SGD, Adagrad)) and optimizer.implementation is Implementation.FUSED
    return is_fused and keeps_dtensors(layout)


NO_RPROP = Limit(
    reason="DTensor: Rprop needs aten.index_put_ or aten._foreach_copy_, which have no sharding strategy that works in place",
    applies=lambda training, layout: isinstance(training.optimizer, Rprop) and keeps_dtensors(layout),
    repair=lambda training, _layout: replace(training, optimizer=SGD(lr=training.optimizer.lr)),
    upstream=True,
)

NO_FUSED_SGD = Limit(
    reason="DTensor: no sharding strategy is registered for aten._fused_sgd_ and aten._fused_adagrad_",
    applies=_is_fused_sgd,
    repair=lambda training, _layout: replace(
        training, optimizer=replace(training.optimizer, implementation=Implementation.FOREACH)
    ),
    upstream=True,
)

DTENSOR_OPTIMIZERS = (NO_RPROP, NO_FUSED_SGD)
"""What no layout can run whose parameters are DTensors."""


def installed_torch() -> Version:
    """The torch that trainings run on; asked of its metadata, as importing it is slow."""
    return Version(version("torch"))


def elementwise(training: Training, _layout: Layout) -> Training:
    """The training with an elementwise optimizer in place of one that is not."""
    optimizer = training.optimizer
    return replace(training, optimizer=AdamW(lr=optimizer.lr, weight_decay=optimizer.weight_decay, maximize=optimizer.maximize))


ANYWHERE = (
    Limit(
        reason=f"torch: Muon came with {Muon.since}, and an older one is installed",
        applies=lambda training, _layout: isinstance(training.optimizer, Muon) and installed_torch() < Version(Muon.since),
        repair=elementwise,
    ),
)
"""What no layout can run."""


def _is_adafactor_of_cuts(training: Training, layout: Layout) -> bool:
    return isinstance(training.optimizer, Adafactor) and keeps_dtensors(layout) and any(matrix_cuts(training, layout))


def _is_muon_of_short_dims(training: Training, layout: Layout) -> bool:
    is_muon = isinstance(training.optimizer, Muon) and keeps_dtensors(layout)
    return is_muon and any(cut.size < cut.ranks for cut in matrix_cuts(training, layout))


def _sees_local_parts(training: Training, layout: Layout) -> bool:
    sees = not training.optimizer.elementwise and not keeps_dtensors(layout)
    return sees and any(cut.ranks > 1 for cut in matrix_cuts(training, layout))


WHOLE_PARAMETERS = (
    Limit(
        reason="DTensor: Adafactor squares norms in place, which is refused while they are pending a sum over shards; of sharded "
        "vectors it takes the norm of the local shard alone, as DTensor.item() does not reduce (pytorch#144054)",
        applies=_is_adafactor_of_cuts,
        repair=elementwise,
        upstream=True,
    ),
    Limit(
        reason="DTensor: a dim cut over more ranks than it is long keeps no cut through Muon's products, which is refused in "
        "place",
        applies=_is_muon_of_short_dims,
        repair=elementwise,
        upstream=True,
    ),
    Limit(
        reason="data parallelism over tensor parallelism: what tensor parallelism cuts is trained as plain local tensors, of "
        "which an optimizer that is not elementwise sees no whole",
        applies=_sees_local_parts,
        repair=elementwise,
    ),
)
"""What no layout can run that cuts parameters."""
