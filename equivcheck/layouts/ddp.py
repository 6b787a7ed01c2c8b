"""`torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from equivcheck.layouts.compile_limits import COMPILED_DDP
from equivcheck.layouts.compression import NO_BF16_HOOK, SENT_AS, compress
from equivcheck.layouts.foreseen.ddp import DDP_FORESIGHT
from equivcheck.layouts.foreseen.foresight import Foresight
from equivcheck.layouts.kind import LayoutKind, LayoutLimit, Limit
from equivcheck.layouts.limits import EVEN_ROWS, ROUNDING_LIMITS, parallelism_of
from equivcheck.layouts.plans import cuts, fits
from equivcheck.layouts.repairs import may_skip_parameters, trained_sides, with_widths, without_frozen, without_side
from equivcheck.layouts.rounding import Rounding
from equivcheck.scenario import (
    DDP,
    Layout,
    LowPrecision,
    Parallelism,
    Precision,
    Side,
    TensorParallel,
    Training,
)
from equivcheck.scenario.mesh import DP, TP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivcheck.train.setup import Setup


def as_reduced(training: Training, layout: Layout) -> Training:
    """The training with what DDP takes for frozen: over tensor parallelism nothing, as local tensors are made trainable."""
    return without_frozen(training) if layout.has(TensorParallel) else training


def _may_miss_parameters(training: Training, layout: Layout) -> bool:
    ddp = parallelism_of(layout, DDP)
    return may_skip_parameters(as_reduced(training, layout)) and not (ddp.find_unused_parameters or ddp.static_graph)


def _changes_graph(training: Training, layout: Layout) -> bool:
    sides = trained_sides(as_reduced(training, layout).model)
    return parallelism_of(layout, DDP).static_graph and Side.EVEN_STEPS in sides and training.steps > 1


UNUSED_PARAMETERS = Limit(
    reason="DistributedDataParallel: parameters that take no part in a step need find_unused_parameters or static_graph",
    applies=_may_miss_parameters,
    repair=lambda training, _layout: without_side(training),
    upstream=True,
)

CHANGING_GRAPH = Limit(
    reason="DistributedDataParallel: static_graph promises the same parameters at every step, but a side runs at even steps only",
    applies=_changes_graph,
    repair=lambda training, _layout: without_side(training),
    upstream=True,
)


AUTOCAST_OF_FLOAT32 = Limit(
    reason="torch.autocast leaves float64 alone: with autocast the training's own precision must be float32",
    applies=lambda training, layout: (
        parallelism_of(layout, DDP).autocast is not None and training.precision is not Precision.FLOAT32
    ),
    repair=lambda training, _layout: replace(training, precision=Precision.FLOAT32),
)


def _shifts_buckets(training: Training, layout: Layout) -> bool:
    if not parallelism_of(layout, DDP).parameters_as_bucket_view or not layout.has(TensorParallel):
        return False
    plan, model = parallelism_of(layout, TensorParallel).plan, training.model
    return fits(model, plan) and any(size % layout.mesh.size(TP) for _, size in cuts(model, plan))


BUCKETS_OF_EQUAL_PARTS = Limit(
    reason="ZeroRedundancyOptimizer with parameters_as_bucket_view over tensor parallelism: behind parts of unequal size a "
    "parameter is aligned otherwise on each rank, BLAS then rounds products of the same values otherwise, and "
    "replicas differ by one ulp; what is cut must be a multiple of the ranks",
    applies=_shifts_buckets,
    repair=lambda training, layout: with_widths(training, layout.mesh.size(TP)),
)


class DDPKind(LayoutKind):
    """Wraps the model in `DistributedDataParallel`."""

    parallelism: ClassVar[type[Parallelism]] = DDP
    limits: ClassVar[tuple[Limit, ...]] = (
        EVEN_ROWS,
        UNUSED_PARAMETERS,
        CHANGING_GRAPH,
        AUTOCAST_OF_FLOAT32,
        BUCKETS_OF_EQUAL_PARTS,
    )
    layout_limits: ClassVar[tuple[LayoutLimit, ...]] = (NO_BF16_HOOK, *ROUNDING_LIMITS, *COMPILED_DDP)
    foresight: ClassVar[Foresight] = DDP_FORESIGHT

    def apply(self, setup: Setup, parallelism: Parallelism, mesh: DeviceMesh) -> None:
        """Wrap the model and average over the mesh."""
        from torch.nn.parallel import DistributedDataParallel

        from equivcheck.layouts.data_rows import take_rows
        from equivcheck.layouts.localized import clip_across, is_localized, localized_slots

        assert isinstance(parallelism, DDP), parallelism
        if parallelism.unequal_start:
            from equivcheck.layouts.unequal import disturb

            disturb(setup.model, mesh)
        module = DistributedDataParallel(
            setup.module,
            device_mesh=mesh,
            bucket_cap_mb=parallelism.bucket_cap_mb,
            gradient_as_bucket_view=parallelism.gradient_as_bucket_view,
            static_graph=parallelism.static_graph,
            find_unused_parameters=parallelism.find_unused_parameters,
        )
        setup.module = module
        setup.loss_scale = mesh.size()
        if is_localized(setup.model):
            setup.find_slots = localized_slots
            setup.clip_norm = clip_across
        if parallelism.no_sync:
            setup.accumulation = lambda last: nullcontext() if last else module.no_sync()
        compress(module, parallelism.compression, mesh)
        if parallelism.autocast is not None:
            setup.around_forward = _autocast(mesh.device_type, parallelism.autocast)
        if parallelism.zero_redundancy:
            from equivcheck.layouts.zero_redundancy import share_updates

            share_updates(setup, mesh, parameters_as_bucket_view=parallelism.parameters_as_bucket_view)
        take_rows(setup, mesh)

    def rounding(self, parallelism: Parallelism, layout: Layout) -> Rounding | None:
        """What autocast casts, and the element type of compressed gradients."""
        assert isinstance(parallelism, DDP), parallelism
        reduce = SENT_AS.get(parallelism.compression)
        if parallelism.autocast is None and reduce is None:
            return None
        return Rounding(
            replicas=1,
            shards=layout.mesh.size(DP),
            autocast=parallelism.autocast,
            reduce=reduce,
            once=parallelism.no_sync,
            whole=True,
        )


def _autocast(device_type: str, kind: LowPrecision) -> Callable[[], AbstractContextManager[object]]:
    import torch

    dtype: torch.dtype = getattr(torch, kind.value)
    return lambda: torch.autocast(device_type, dtype=dtype)
