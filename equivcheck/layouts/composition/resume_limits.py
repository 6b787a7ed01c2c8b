"""Limits for resuming under one layout from a checkpoint saved under another."""

from __future__ import annotations

from dataclasses import fields, replace

from equivcheck.layouts.base.dtensor_experts import has_dtensor_experts
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.limits.optimizers import keeps_dtensors
from equivcheck.layouts.base.limits.repairs import (
    each_layer,
    has_frozen,
    may_skip_parameters,
    with_options,
    without_auxiliary,
    without_frozen,
)
from equivcheck.layouts.base.plan.rules import UNFREEZES, frozen_shards, norms_made_trainable
from equivcheck.layouts.composition.registry import rounds
from equivcheck.layouts.parallelisms.pipeline.stages import ALWAYS_SPLIT, has_lost_gradients, stages_behind_frozen_layers
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    Compression,
    ContextParallel,
    ExpertParallel,
    ExpertStorage,
    Layout,
    LocalDataParallel,
    LocalTensorParallel,
    Mesh,
    Pipeline,
    PlannedParallelism,
    Precision,
    Replicate,
    Scenario,
    TensorParallel,
    Training,
)
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, Axis


def _by_dtensors(layout: Layout) -> Layout:
    """Replace plain shards by DTensors, whose placements are known.

    If other parallelisms need plain shards, use FSDP2 on all ranks.
    """
    if not layout.has(LocalTensorParallel):
        return with_options(layout, ExpertParallel, storage=ExpertStorage.DTENSOR)
    if layout.has(LocalDataParallel, ContextParallel, ExpertParallel, Pipeline):
        return replace(layout, mesh=Mesh(axes=(Axis(name=DP, size=layout.mesh.num_ranks),)), parallelisms=(FSDP2(),))
    (local,) = layout.of(LocalTensorParallel)
    plan = TensorParallel(**{field.name: getattr(local, field.name) for field in fields(PlannedParallelism)})
    return replace(layout, parallelisms=tuple(plan if each is local else each for each in layout.parallelisms))


def _on_dtensors(layout: Layout) -> Layout:
    kept = (PlannedParallelism, ExpertParallel, FSDP2, SPMD, Pipeline)
    parallelisms = tuple(each if isinstance(each, kept) else FSDP2() for each in layout.parallelisms)
    return replace(layout, parallelisms=parallelisms)


def _in_one_precision(layout: Layout) -> Layout:
    layout = with_options(with_options(layout, DDP, autocast=None), (DDP, Replicate), compression=Compression.NONE)
    return with_options(layout, (FSDP1, FSDP2), mixed_precision=None)


CHECKPOINT_LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    LayoutLimit(
        reason="checkpoint: a layout that rounds to other element types is not supported: the single-device run rounds like one "
        "layout in all steps, and cannot change its rounding at the checkpoint",
        applies=rounds,
        repair=_in_one_precision,
    ),
    LayoutLimit(
        reason="checkpoint: ZeroRedundancyOptimizer is not supported: torch.distributed.checkpoint calls state_dict() on every "
        "rank, but only the ranks named in consolidate_state_dict(to=...) have the state",
        applies=lambda layout: any(ddp.zero_redundancy for ddp in layout.of(DDP)),
        repair=lambda layout: with_options(layout, DDP, zero_redundancy=False, parameters_as_bucket_view=False),
    ),
    LayoutLimit(
        reason="checkpoint: FullyShardedDataParallel with replicas of a single shard is not supported: optim_state_dict "
        "broadcasts from rank 0 in groups that do not contain it",
        applies=lambda layout: layout.has(FSDP1) and layout.mesh.size(SHARD) == 1 and layout.mesh.size(REPLICATE) > 1,
        repair=_on_dtensors,
    ),
    LayoutLimit(
        reason="checkpoint: FullyShardedDataParallel over tensor parallelism or DTensor experts is not supported: "
        "optim_state_dict_to_load gives every rank along these axes the optimizer state of the first one",
        applies=lambda layout: layout.has(FSDP1) and (layout.has(TensorParallel) or has_dtensor_experts(layout)),
        repair=_on_dtensors,
    ),
    LayoutLimit(
        reason="checkpoint: DistributedDataParallel or replicate over tensor parallelism or DTensor experts is not supported: "
        "they train local tensors, and torch.distributed.checkpoint does not know their placements",
        applies=lambda layout: (layout.has(TensorParallel) or has_dtensor_experts(layout)) and not keeps_dtensors(layout),
        repair=_on_dtensors,
    ),
    LayoutLimit(
        reason="checkpoint: plain tensors that hold a rank's part, from local_tensor_parallel or expert parallelism, are not "
        "supported: torch.distributed.checkpoint takes plain tensors for full ones that are the same on every rank",
        applies=lambda layout: (
            layout.has(LocalTensorParallel) or (layout.has(ExpertParallel) and not has_dtensor_experts(layout))
        ),
        repair=_by_dtensors,
    ),
    LayoutLimit(
        reason="checkpoint: a zero-bubble schedule with stages that are resharded after forward is not supported: the stages get "
        "no gradients, so the checkpoint lacks state that their optimizer asks for",
        applies=has_lost_gradients,
        repair=lambda layout: with_options(layout, FSDP2, reshard_after_forward=False, reshard_to=None),
    ),
)
"""Layouts that can neither save a checkpoint nor resume from one."""


def _drops_gradients(training: Training, layout: Layout) -> bool:
    schedules = [pipeline.schedule for pipeline in layout.of(Pipeline)]
    return any(schedule in ALWAYS_SPLIT for schedule in schedules) and bool(stages_behind_frozen_layers(training.model, layout))


CHECKPOINT_LIMITS: tuple[Limit, ...] = (
    Limit(
        reason="checkpoint: a trained parameter that takes no part in a step is not supported: the optimizer creates state for "
        "it before it loads, and the checkpoint has none",
        applies=lambda training, _layout: may_skip_parameters(training),
        repair=lambda training, _layout: without_auxiliary(training),
    ),
    Limit(
        reason="checkpoint: a zero-bubble schedule with a stage behind frozen layers is not supported: the stage gets no "
        "gradients, so the checkpoint lacks state that its optimizer asks for",
        applies=_drops_gradients,
        repair=lambda training, _layout: without_frozen(training),
        torch=">=2.13",
    ),
    Limit(
        reason="checkpoint: Adagrad with frozen parameters is not supported: Adagrad creates state for them when it is built, "
        "which is neither saved nor loaded",
        applies=lambda training, _layout: training.optimizer.keeps_state_for_frozen and has_frozen(training.model),
        repair=lambda training, _layout: without_frozen(training),
    ),
    Limit(
        reason="checkpoint: SequenceParallel with frozen norms is not supported: it makes them trainable, so one layout has "
        "optimizer state for them and the other has none",
        applies=lambda training, layout: bool(norms_made_trainable(training.model, layout)),
        repair=lambda training, _layout: each_layer(
            training, lambda _index, layer: layer.with_fields(norm=None) if layer.frozen else layer
        ),
    ),
    Limit(
        reason="checkpoint: parallelize_module with frozen parameters is not supported: it makes them trainable, so one layout "
        "has optimizer state for them and the other has none",
        applies=lambda training, layout: bool(frozen_shards(training.model, layout)),
        repair=lambda training, _layout: without_frozen(training),
        torch=UNFREEZES,
    ),
    Limit(
        reason="checkpoint: SGD with momentum and partial gradients is not supported: momentum begins as a copy of the "
        "gradient, and a partial tensor is not saved ('Any checkpointing related operations are not supported for DTensor with "
        "partial placements!')",
        applies=lambda training, layout: (
            isinstance(training.optimizer, SGD) and training.optimizer.momentum > 0 and not layout.redistributes_gradients
        ),
        repair=lambda training, _layout: replace(training, optimizer=SGD(lr=training.optimizer.lr)),
        torch="!=2.12.*,!=2.13.*",  # these redistribute a gradient when they copy it
    ),
    Limit(
        reason="checkpoint: ASGD or NAdam in a precision other than float32 is not supported: they count in float32, and "
        "Optimizer.load_state_dict casts the counts to the parameter's element type",
        applies=lambda training, _layout: training.optimizer.counts_in_float32 and training.precision is not Precision.FLOAT32,
        repair=lambda training, _layout: replace(training, precision=Precision.FLOAT32),
    ),
)
"""Trainings that cannot resume under another layout."""


def flattenings(*layouts: Layout) -> tuple[bool, ...]:
    """Return the allowed values of `flatten_optimizer_state_dict` if these layouts save or load a checkpoint."""
    has_stages = any(layout.has(Pipeline) for layout in layouts)
    is_flat = any(isinstance(each, FSDP1) and not each.use_orig_params for layout in layouts for each in layout.parallelisms)
    return (*(() if has_stages else (False,)), *(() if is_flat else (True,)))


def wrong_flattening(scenario: Scenario) -> str | None:
    """Return the reason why the scenario's value of `flatten_optimizer_state_dict` is not allowed. None if it is allowed."""
    if scenario.resume is None or scenario.resume.flatten_optimizer_state_dict in flattenings(*scenario.layouts):
        return None
    if scenario.resume.flatten_optimizer_state_dict:
        return (
            "checkpoint: flattened optimizer state with FullyShardedDataParallel(use_orig_params=False) is not supported: it "
            "cannot load flattened state of an optimizer that keeps none"
        )
    return (
        "checkpoint: nested optimizer state with pipeline stages is not supported: stages have different parameter groups under "
        "the same name; flatten the state"
    )
