"""Limits that several data parallelisms share."""

from __future__ import annotations

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.limits.repairs import all_multiples, with_execution, with_options, with_rows
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    Compile,
    Compression,
    ContextParallel,
    ExpertParallel,
    Layout,
    Pipeline,
    PlannedParallelism,
    Replicate,
    Replicator,
    TensorParallel,
)
from equivcheck.scenario.parallelisms.data_parallel import DEFAULT_BUCKET_MB

EVEN_ROWS = Limit(
    reason="data parallelism: a microbatch whose rows are not a multiple of the data-parallel ranks is not supported: it "
    "cannot be split evenly",
    applies=lambda training, layout: not all_multiples(training.data.microbatches, layout.num_data_ranks),
    repair=lambda training, layout: with_rows(training, layout.num_data_ranks),
)


def _casts(layout: Layout) -> bool:
    """Whether an option changes the compute or reduction dtype."""
    policies = [fsdp.mixed_precision for fsdp in layout.of(FSDP1)] + [fsdp.mixed_precision for fsdp in layout.of(FSDP2)]
    return any(policies) or any(ddp.autocast for ddp in layout.of(DDP))


def _compresses(layout: Layout) -> bool:
    compressions = [ddp.compression for ddp in layout.of(DDP)] + [replicate.compression for replicate in layout.of(Replicate)]
    return any(compression is not Compression.NONE for compression in compressions)


def _without_casts(layout: Layout) -> Layout:
    return with_options(with_options(layout, DDP, autocast=None), (FSDP1, FSDP2), mixed_precision=None)


def _without_rounding(layout: Layout) -> Layout:
    return with_options(_without_casts(layout), (DDP, Replicate), compression=Compression.NONE)


ROUNDING_LIMITS = (
    LayoutLimit(
        reason="lower precision: mixed_precision, autocast or compression over tensor, context or expert parallelism is not "
        "supported: each rank rounds its partial sum, which the single-device run does not have",
        applies=lambda layout: (
            (_casts(layout) or _compresses(layout)) and layout.has(PlannedParallelism, ContextParallel, ExpertParallel)
        ),
        repair=_without_rounding,
    ),
    LayoutLimit(
        reason="lower precision: mixed_precision, autocast or compression of pipeline stages is not supported: each stage rounds "
        "the chunks that it sends and adds up, which the single-device run does not have",
        applies=lambda layout: (_casts(layout) or _compresses(layout)) and layout.has(Pipeline),
        repair=_without_rounding,
    ),
    LayoutLimit(
        reason="torch.compile: mixed_precision or autocast is not supported: a compiled graph may round at other places than the "
        "eager model",
        applies=lambda layout: layout.execution.is_compiled and _casts(layout),
        repair=_without_casts,
    ),
)
"""Layouts whose rounding the single-device run cannot reproduce."""

FIRST_BUCKET_MB = 1.0
"""`DDPOptimizer`, which splits compiled graphs along DDP's buckets, assumes this size for the first bucket."""


def _has_small_buckets(layout: Layout) -> bool:
    is_split = layout.execution.compile is not Compile.NONE and not layout.execution.compiled_autograd
    caps = [ddp.bucket_cap_mb for ddp in layout.of(DDP)] + [replicate.bucket_cap_mb for replicate in layout.of(Replicate)]
    return is_split and any(cap < FIRST_BUCKET_MB for cap in caps)


def _has_ddp_over_tp(layout: Layout) -> bool:
    by_ddp = layout.has(DDP) or any(parallelism.implementation is Replicator.DDP for parallelism in layout.of(Replicate))
    return by_ddp and layout.has(TensorParallel)


COMPILED_DDP = (
    LayoutLimit(
        reason="torch.compile of DistributedDataParallel: a bucket below 1 MiB is not supported: DDPOptimizer expects a first "
        "bucket of 1 MiB ('First bucket should be ...')",
        applies=_has_small_buckets,
        repair=lambda layout: with_options(layout, (DDP, Replicate), bucket_cap_mb=DEFAULT_BUCKET_MB),
    ),
    LayoutLimit(
        reason="DistributedDataParallel over tensor parallelism: compiling the whole model is not supported: DDP swaps DTensors "
        "and local tensors, so that backward goes through a parameter twice; compile each layer",
        applies=lambda layout: (
            _has_ddp_over_tp(layout) and layout.execution.compile is not Compile.NONE and not layout.execution.per_layer
        ),
        repair=lambda layout: with_execution(layout, per_layer=True),
    ),
    LayoutLimit(
        # https://github.com/pytorch/pytorch/issues/127797
        reason="DistributedDataParallel over tensor parallelism: compiled autograd is not supported: it cannot trace the "
        "backward of the DTensors",
        applies=lambda layout: _has_ddp_over_tp(layout) and layout.execution.compiled_autograd,
        repair=lambda layout: with_execution(layout, compiled_autograd=False),
    ),
)
"""Limits for every parallelism built on `DistributedDataParallel`."""

FSDP_WITHOUT_COMPILED_AUTOGRAD = LayoutLimit(
    # https://github.com/pytorch/pytorch/pull/174906 removed FSDP's support for compiled autograd.
    reason="FSDP: compiled autograd is not supported: it does not run FSDP's hooks, so gradients are missing",
    applies=lambda layout: layout.execution.compiled_autograd,
    repair=lambda layout: with_execution(layout, compiled_autograd=False),
)
