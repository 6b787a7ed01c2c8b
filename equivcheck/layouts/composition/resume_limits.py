"""What cannot resume under one layout from a checkpoint of another."""

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
from equivcheck.layouts.base.plan.rules import UNFREEZES, frozen_splits, unfrozen_norms
from equivcheck.layouts.composition.registry import rounds
from equivcheck.layouts.parallelisms.pipeline.stages import ALWAYS_SPLIT, stages_behind_frozen_layers
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
    Parallelism,
    Pipeline,
    PlannedParallelism,
    Precision,
    Replicate,
    Scenario,
    TensorParallel,
    Training,
)
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, Axis


def _shares_updates(layout: Layout) -> bool:
    return any(parallelism.zero_redundancy for parallelism in layout.of(DDP))


def _is_localized(layout: Layout) -> bool:
    return (layout.has(TensorParallel) or has_dtensor_experts(layout)) and not keeps_dtensors(layout)


def _by_dtensors(layout: Layout) -> Layout:
    """The same plan or experts, whose parts know of what they are parts; shards over all ranks where others want plain ones."""
    if not layout.has(LocalTensorParallel):
        return with_options(layout, ExpertParallel, storage=ExpertStorage.DTENSOR)
    if layout.has(LocalDataParallel, ContextParallel, ExpertParallel):
        return replace(layout, mesh=Mesh(axes=(Axis(name=DP, size=layout.mesh.num_ranks),)), parallelisms=(FSDP2(),))
    return replace(layout, parallelisms=tuple(map(_of_dtensors, layout.parallelisms)))


def _of_dtensors(parallelism: Parallelism) -> Parallelism:
    if not isinstance(parallelism, LocalTensorParallel):
        return parallelism
    return TensorParallel(**{field.name: getattr(parallelism, field.name) for field in fields(PlannedParallelism)})


def _has_replicas_of_one_shard(layout: Layout) -> bool:
    mesh = layout.mesh
    return layout.has(FSDP1) and mesh.size(SHARD) == 1 and mesh.size(REPLICATE) > 1


def _on_dtensors(layout: Layout) -> Layout:
    kept = (PlannedParallelism, ExpertParallel, FSDP2, SPMD, Pipeline)
    parallelisms = tuple(each if isinstance(each, kept) else FSDP2() for each in layout.parallelisms)
    return replace(layout, parallelisms=parallelisms)


def _in_one_precision(layout: Layout) -> Layout:
    layout = with_options(with_options(layout, DDP, autocast=None), (DDP, Replicate), compression=Compression.NONE)
    return with_options(layout, (FSDP1, FSDP2), mixed_precision=None)


CHECKPOINT_LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    LayoutLimit(
        reason="checkpoint: the reference rounds as one layout does, and cannot change that in the middle",
        applies=rounds,
        repair=_in_one_precision,
    ),
    LayoutLimit(
        reason="checkpoint: ZeroRedundancyOptimizer has a state_dict only on ranks that it was consolidated to, and "
        "torch.distributed.checkpoint asks every rank",
        applies=_shares_updates,
        repair=lambda layout: with_options(layout, DDP, zero_redundancy=False, parameters_as_bucket_view=False),
    ),
    LayoutLimit(
        reason="checkpoint: FullyShardedDataParallel.optim_state_dict, on replicas of a single shard, broadcasts from rank 0 in "
        "groups that are without it",
        applies=_has_replicas_of_one_shard,
        repair=_on_dtensors,
    ),
    LayoutLimit(
        reason="checkpoint: over tensor parallelism, or experts that are DTensors, DistributedDataParallel, replicate and "
        "FullyShardedDataParallel train local tensors, and torch.distributed.checkpoint does not know where they lie",
        applies=_is_localized,
        repair=_on_dtensors,
    ),
    LayoutLimit(
        reason="checkpoint: torch.distributed.checkpoint takes plain tensors for whole ones, of which every rank has the same",
        applies=lambda layout: (
            layout.has(LocalTensorParallel) or (layout.has(ExpertParallel) and not has_dtensor_experts(layout))
        ),
        repair=_by_dtensors,
    ),
)
"""Which layouts a training can neither leave nor go on under."""


def _keeps_momentum(training: Training) -> bool:
    return isinstance(training.optimizer, SGD) and training.optimizer.momentum > 0


def _drops_gradients(training: Training, layout: Layout) -> bool:
    schedules = [pipeline.schedule for pipeline in layout.of(Pipeline)]
    return any(schedule in ALWAYS_SPLIT for schedule in schedules) and bool(stages_behind_frozen_layers(training.model, layout))


CHECKPOINT_LIMITS: tuple[Limit, ...] = (
    Limit(
        reason="checkpoint: an optimizer makes state for every trained parameter before state is loaded into it, and a "
        "checkpoint has none for one that took no part",
        applies=lambda training, _layout: may_skip_parameters(training),
        repair=lambda training, _layout: without_auxiliary(training),
    ),
    Limit(
        reason="checkpoint: zero-bubble schedules give no gradient to a stage behind frozen layers, so that a checkpoint has no "
        "state for its parameters, and an optimizer asks for it",
        applies=_drops_gradients,
        repair=lambda training, _layout: without_frozen(training),
        torch=">=2.13",
    ),
    Limit(
        reason="checkpoint: state of frozen parameters, which Adagrad makes when it is built, is neither asked for nor kept",
        applies=lambda training, _layout: training.optimizer.keeps_state_of_frozen and has_frozen(training.model),
        repair=lambda training, _layout: without_frozen(training),
    ),
    Limit(
        reason="checkpoint: SequenceParallel makes frozen norms trainable, so that one layout has optimizer state for them and "
        "the other none",
        applies=lambda training, layout: bool(unfrozen_norms(training.model, layout)),
        repair=lambda training, _layout: each_layer(
            training, lambda _index, layer: layer.having(norm=None) if layer.frozen else layer
        ),
    ),
    Limit(
        reason="checkpoint: parallelize_module makes frozen parameters trainable, so that one layout has optimizer state for "
        "them and the other none",
        applies=lambda training, layout: bool(frozen_splits(training.model, layout)),
        repair=lambda training, _layout: without_frozen(training),
        torch=UNFREEZES,
    ),
    Limit(
        reason="checkpoint: SGD's momentum begins as a copy of the gradient, and is not saved where that is left pending a sum "
        "('Any checkpointing related operations are not supported for DTensor with partial placements!')",
        applies=lambda training, layout: _keeps_momentum(training) and not layout.redistributes_gradients,
        repair=lambda training, _layout: replace(training, optimizer=SGD(lr=training.optimizer.lr)),
        torch="!=2.12.*,!=2.13.*",  # these two redistribute a gradient that is copied
    ),
    Limit(
        reason="checkpoint: Optimizer.load_state_dict casts to the parameter's element type what ASGD and NAdam count in float32",
        applies=lambda training, _layout: training.optimizer.counts_in_float32 and training.precision is not Precision.FLOAT32,
        repair=lambda training, _layout: replace(training, precision=Precision.FLOAT32),
    ),
)
"""Which trainings cannot resume under another layout."""


def flattenings(*layouts: Layout) -> tuple[bool, ...]:
    """Whether optimizer state that goes from one layout to another may be left nested, and whether it may be flattened."""
    has_stages = any(layout.has(Pipeline) for layout in layouts)
    is_flat = any(isinstance(each, FSDP1) and not each.use_orig_params for layout in layouts for each in layout.parallelisms)
    return (*(() if has_stages else (False,)), *(() if is_flat else (True,)))


def wrong_flattening(scenario: Scenario) -> str | None:
    """Why optimizer state cannot go from one layout to the other as the scenario has it; None where it can."""
    if scenario.resume is None or scenario.resume.flatten_optimizer_state_dict in flattenings(*scenario.layouts):
        return None
    if scenario.resume.flatten_optimizer_state_dict:
        return (
            "checkpoint: FullyShardedDataParallel without use_orig_params takes no flattened state of optimizers that have none"
        )
    return "checkpoint: stages of a pipeline have parameter groups of their own under one name unless their state is flattened"
