"""Limits for `DistributedDataParallel`."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.data_parallel import COMPILED_DDP, EVEN_ROWS, ROUNDING_LIMITS
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.repairs import (
    has_shares,
    may_skip_parameters,
    trained_auxiliaries,
    with_options,
    with_widths,
    without_auxiliary,
    without_frozen,
    without_shares,
)
from equivcheck.layouts.base.plan.rules import cuts
from equivcheck.layouts.parallelisms.pipeline.stages import ALWAYS_SPLIT, INFERS_BACKWARD, num_stages, stages_without_training
from equivcheck.scenario import (
    DDP,
    AuxiliaryLinear,
    Checkpointing,
    Compression,
    Layout,
    Pipeline,
    PlannedParallelism,
    Precision,
    Replicate,
    TensorParallel,
    Training,
)
from equivcheck.scenario.mesh import TP


def as_reduced(training: Training, layout: Layout) -> Training:
    """Return the training with only the frozen layers that DDP knows about.

    With tensor parallelism, DDP gets only trainable local tensors, so no layer is frozen.
    """
    return without_frozen(training) if layout.has(TensorParallel) else training


def _may_miss_parameters(training: Training, layout: Layout) -> bool:
    ddp = parallelism_of(layout, DDP)
    return may_skip_parameters(as_reduced(training, layout)) and not (ddp.find_unused_parameters or ddp.static_graph)


def _changes_graph(training: Training, layout: Layout) -> bool:
    auxiliaries = trained_auxiliaries(as_reduced(training, layout).model)
    return parallelism_of(layout, DDP).static_graph and AuxiliaryLinear.EVEN_STEPS in auxiliaries and training.steps > 1


UNUSED_PARAMETERS = UpstreamLimit(
    reason="DistributedDataParallel: a parameter that takes no part in a step is not supported without find_unused_parameters "
    "or static_graph: the reduction of its bucket does not finish",
    applies=_may_miss_parameters,
    repair=lambda training, _layout: without_auxiliary(training),
)

CHANGING_GRAPH = Limit(
    reason="DistributedDataParallel: static_graph with an auxiliary linear that runs at even steps only is not supported: "
    "static_graph assumes the same parameters at every step, and DDP does not check this, so gradients stay unreduced",
    applies=_changes_graph,
    repair=lambda training, _layout: without_auxiliary(training),
)


TRAINED_STAGES = Limit(
    reason="DistributedDataParallel: a pipeline stage that uses no trained parameter in some step is not supported: DDP refuses "
    "a stage without trained parameters, and in a step that uses none of them no hook runs, so the reduction does not finish, "
    "and a later backward may raise ('Expected to mark a variable ready only once')",
    applies=lambda training, layout: (
        layout.has(Pipeline) and any(stages_without_training(training.model, layout, step) for step in range(training.steps))
    ),
    repair=lambda training, _layout: without_frozen(training),
)


AUTOCAST_OF_FLOAT32 = Limit(
    reason="torch.autocast: a training precision other than float32 is not supported: autocast does not cast float64",
    applies=lambda training, layout: (
        parallelism_of(layout, DDP).autocast is not None and training.precision is not Precision.FLOAT32
    ),
    repair=lambda training, _layout: replace(training, precision=Precision.FLOAT32),
)


SHARED_WEIGHTS_CAST_ONCE = UpstreamLimit(
    reason="torch.autocast: selective checkpointing of layers with a shared weight is not supported: in forward the second layer "
    "takes the cast weight from autocast's cache, but backward casts it again ('aten._to_copy.default encountered during "
    "backward but not found in storage')",
    applies=lambda training, layout: (
        parallelism_of(layout, DDP).autocast is not None
        and layout.execution.checkpointing is Checkpointing.SELECTIVE
        and has_shares(training.model)
    ),
    repair=lambda training, _layout: without_shares(training),
    torch=">=2.13",
)


def _shifts_buckets(training: Training, layout: Layout) -> bool:
    if not parallelism_of(layout, DDP).parameters_as_bucket_view or not layout.has(PlannedParallelism):
        return False
    tp = parallelism_of(layout, PlannedParallelism)
    return any(size % layout.mesh.size(TP) for _, size in cuts(training.model, tp))


BUCKETS_OF_EQUAL_PARTS = Limit(
    reason="ZeroRedundancyOptimizer with parameters_as_bucket_view over tensor parallelism: uneven shards are not supported: "
    "later parameters in the bucket have another alignment on each rank, so BLAS rounds their products differently, and replicas "
    "differ by one ulp",
    applies=_shifts_buckets,
    repair=lambda training, layout: with_widths(training, layout.mesh.size(TP)),
)


def _has_bf16_hook(layout: Layout) -> bool:
    compressions = [ddp.compression for ddp in layout.of(DDP)] + [replicate.compression for replicate in layout.of(Replicate)]
    return Compression.BF16 in compressions


NO_BF16_HOOK = LayoutLimit(
    reason="DistributedDataParallel: bf16_compress_hook on CPU ranks is not supported: it is refused without CUDA and NCCL (or "
    "XPU)",
    applies=_has_bf16_hook,
    repair=lambda layout: with_options(layout, (DDP, Replicate), compression=Compression.FP16),
)

LIMITS: tuple[Limit, ...] = (
    EVEN_ROWS,
    UNUSED_PARAMETERS,
    CHANGING_GRAPH,
    TRAINED_STAGES,
    AUTOCAST_OF_FLOAT32,
    SHARED_WEIGHTS_CAST_ONCE,
    BUCKETS_OF_EQUAL_PARTS,
)


def _without_static_graph(layout: Layout) -> Layout:
    return with_options(layout, DDP, static_graph=False)


def _is_static_in_chunks(layout: Layout) -> bool:
    return layout.has(Pipeline) and layout.num_chunks > 1 and parallelism_of(layout, DDP).static_graph


STATIC_STAGES_OF_ONE_CHUNK = LayoutLimit(
    reason="DistributedDataParallel: static_graph of pipeline stages that run several chunks is not supported: the last chunk's "
    "backward fails an assertion, because the earlier ones run without synchronization",
    applies=_is_static_in_chunks,
    repair=_without_static_graph,
    torch="<2.12",
)

STATIC_STAGES_OF_ONE_CHUNK_OF_GIVEN_SHAPES = replace(
    STATIC_STAGES_OF_ONE_CHUNK,
    reason="DistributedDataParallel: static_graph of pipeline stages that run several chunks with static_shapes is not "
    "supported: the last chunk's backward fails an assertion, because the earlier ones run without synchronization",
    # Stages that infer their shapes run through DDP once before the first chunk, and none fails.
    applies=lambda layout: _is_static_in_chunks(layout) and parallelism_of(layout, Pipeline).static_shapes,
    torch=INFERS_BACKWARD,
)

STATIC_STAGES_OF_GIVEN_SHAPES = LayoutLimit(
    reason="DistributedDataParallel: static_graph of pipeline stages that infer their shapes is not supported: DDP takes the "
    "backward that infers shapes for its first iteration, so the first step's gradients stay unreduced",
    applies=lambda layout: (
        parallelism_of(layout, DDP).static_graph
        and any(not pipeline.static_shapes and num_stages(layout) > 1 for pipeline in layout.of(Pipeline))
    ),
    repair=_without_static_graph,
    torch=INFERS_BACKWARD,
)

STATIC_STAGES_OF_FULL_BACKWARDS = LayoutLimit(
    reason="DistributedDataParallel: static_graph of pipeline stages under a zero-bubble schedule is not supported: the "
    "backward for input gradients runs under no_sync, but static_graph queues its reduction in this backward "
    "('expect_autograd_hooks_ INTERNAL ASSERT FAILED')",
    applies=lambda layout: (
        parallelism_of(layout, DDP).static_graph
        and any(pipeline.schedule in ALWAYS_SPLIT and num_stages(layout) > 1 for pipeline in layout.of(Pipeline))
    ),
    repair=_without_static_graph,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    NO_BF16_HOOK,
    STATIC_STAGES_OF_FULL_BACKWARDS,
    STATIC_STAGES_OF_ONE_CHUNK,
    STATIC_STAGES_OF_ONE_CHUNK_OF_GIVEN_SHAPES,
    STATIC_STAGES_OF_GIVEN_SHAPES,
    *ROUNDING_LIMITS,
    *COMPILED_DDP,
)
