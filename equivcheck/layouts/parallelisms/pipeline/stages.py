"""How a pipeline distributes layers over stages, and stages over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.base.limits.repairs import is_tied
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Layout,
    Model,
    Pipeline,
    PipelineSchedule,
    PlannedParallelism,
    Replicate,
    Replicator,
    Training,
)
from equivcheck.scenario.mesh import PP
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.parameters import parameters_of, trains_layer
from equivcheck.training.layers.token_facts import head_parameters

ALWAYS_SPLIT = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
"""Schedules with separate passes for input and weight gradients, for every chunk."""
SPLIT = (*ALWAYS_SPLIT, PipelineSchedule.DUAL_PIPE_V)
"""Schedules with separate passes for input and weight gradients, for at least some chunks."""
FINALIZES_GRADIENTS = ">=2.15"
"""Versions whose schedules can leave FSDP stages unreduced until the last of several `step()` calls."""
INFERS_BACKWARD = ">=2.12"
"""Versions in which a stage behind the first infers shapes by a forward and a backward; earlier versions run only a forward."""


Use = tuple[str, int]
"""One use of a shared weight: canonical name of the module, and index of its stage or rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """Weight that stages on several ranks use. Each rank has a copy."""

    uses: tuple[Use, ...]
    """Modules with this weight, each with its rank. The owning module comes first."""
    trained: bool
    """Whether the weight requires a gradient."""

    @property
    def owner(self) -> str:
        """Name of the module that owns the weight."""
        return self.uses[0][0]

    @property
    def name(self) -> str:
        """Name of the weight in the full model."""
        return f"{self.owner}.weight"

    @property
    def first_rank(self) -> int:
        """Rank with the module that owns the weight. Only the copy on this rank counts as a parameter of the full model."""
        return self.uses[0][1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with a copy, in ascending order."""
        return tuple(sorted({rank for _, rank in self.uses}))


def splits_backward(layout: Layout) -> bool:
    """Whether the schedule computes input and weight gradients in separate passes for some chunk.

    Zero-bubble schedules always do this. DualPipeV does it on several ranks.
    """
    return parallelism_of(layout, Pipeline).schedule in ALWAYS_SPLIT or sometimes_splits_backward(layout)


def sometimes_splits_backward(layout: Layout) -> bool:
    """Whether DualPipeV runs on several ranks. For some chunks, it computes input and weight gradients in separate passes."""
    return parallelism_of(layout, Pipeline).schedule is PipelineSchedule.DUAL_PIPE_V and layout.mesh.size(PP) > 1


def stages_of_rank(pipeline: Pipeline, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the stages on a rank in ascending order.

    Stages are assigned round-robin. A V schedule assigns them from the first rank to the last rank, and then back.
    """
    if pipeline.schedule.is_v:
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * pipeline.stages_per_rank, ranks))


def rank_of_stages(pipeline: Pipeline, ranks: int) -> dict[int, int]:
    """Return a dict with the rank of each stage."""
    return {stage: rank for rank in range(ranks) for stage in stages_of_rank(pipeline, rank, ranks)}


def layers_of_stages(pipeline: Pipeline, ranks: int, num_layers: int) -> tuple[range, ...]:
    """Return the range of layers in each stage.

    Layers are split at the given boundaries, or else as evenly as possible. If the numbers of layers differ, the first stages
    have one more.
    """
    if pipeline.boundaries:
        starts: Sequence[int] = (0, *pipeline.boundaries)
    else:
        count = ranks * pipeline.stages_per_rank
        starts = [stage * (num_layers // count) + min(stage, num_layers % count) for stage in range(count)]
    return tuple(range(start, end) for start, end in zip(starts, (*starts[1:], num_layers), strict=True))


def num_stages(layout: Layout) -> int:
    """Return the number of stages in a layout with a pipeline."""
    return layout.mesh.size(PP) * parallelism_of(layout, Pipeline).stages_per_rank


def stage_of_layers(layout: Layout, num_layers: int) -> tuple[int, ...]:
    """Return the index of each layer's stage."""
    spans = layers_of_stages(parallelism_of(layout, Pipeline), layout.mesh.size(PP), num_layers)
    return tuple(stage for stage, layers in enumerate(spans) for _ in layers)


def balanced_before_last_stage(model: Model, layout: Layout) -> tuple[int, ...]:
    """Return the layers with a load-balancing loss in stages before the last one. Empty without a pipeline."""
    if not layout.has(Pipeline):
        return ()
    stages = stage_of_layers(layout, len(model.layers))
    return tuple(index for index, layer in enumerate(model.layers) if layer.balance and stages[index] < stages[-1])


def stages_behind_frozen_layers(model: Model, layout: Layout) -> set[int]:
    """Return the stages with only frozen layers before them, except the first stage. Their inputs need no gradient."""
    if model.source is not None and not model.source.frozen:
        return set()
    stages, trained = stage_of_layers(layout, len(model.layers)), trained_layers(model)
    return {stage for stage in stages if stage and not any(trained[: stages.index(stage)])}


def uses_of_weights(model: Model, pipeline: Pipeline, ranks: int) -> tuple[tuple[Use, ...], ...]:
    """Return for each shared weight the modules that use it, with their stages. The module that owns the weight comes first."""
    spans = layers_of_stages(pipeline, ranks, len(model.layers))
    stages = [stage for stage, span in enumerate(spans) for _ in span]
    found: dict[str, list[Use]] = {}
    for index, layer in enumerate(model.layers):
        if layer.shares is not None:
            owner = f"layers.{layer.shares}.linear"
            found.setdefault(owner, [(owner, stages[layer.shares])]).append((f"layers.{index}.linear", stages[index]))
    tied = [(("embedding", 0), ("head.linear", len(spans) - 1))] if is_tied(model) else []
    return (*tied, *map(tuple, found.values()))


def uses_weight_twice(model: Model, pipeline: Pipeline, ranks: int) -> bool:
    """Whether several modules in the same stage use the same weight."""
    uses_in_stages = [[stage for _, stage in uses] for uses in uses_of_weights(model, pipeline, ranks)]
    return any(len(stages) > len(set(stages)) for stages in uses_in_stages)


def weights_of_several_ranks(model: Model, pipeline: Pipeline, ranks: int) -> tuple[SharedWeight, ...]:
    """Return the weights used by stages on several ranks, in the same order on all ranks."""
    rank_of = rank_of_stages(pipeline, ranks)
    trained = {parameter.full_name: parameter.trained for parameter in parameters_of(model)}
    found = []
    for uses in uses_of_weights(model, pipeline, ranks):
        placed = tuple((module, rank_of[stage]) for module, stage in uses)
        found.append(SharedWeight(uses=placed, trained=trained[f"{uses[0][0]}.weight"]))
    return tuple(weight for weight in found if len(weight.ranks) > 1)


def has_weight_of_two_stages(model: Model, layout: Layout) -> bool:
    """Whether two stages on the same rank use the same weight."""
    ranks = layout.mesh.size(PP)
    for pipeline in layout.of(Pipeline):
        rank_of = rank_of_stages(pipeline, ranks)
        for uses in uses_of_weights(model, pipeline, ranks):
            stages = {stage for _, stage in uses}
            if len(stages) > len({rank_of[stage] for stage in stages}):
                return True
    return False


def has_dtensors_in_layers(layout: Layout) -> bool:
    """Whether modules in layers compute DTensors, and return their local tensors."""
    return any(each.returns_local_tensors for each in layout.of(PlannedParallelism))


def has_fsdp_stages(layout: Layout) -> bool:
    """Whether pipeline stages are FSDP modules. The schedule then gathers parameters and reduces gradients."""
    replicates = any(each.implementation is Replicator.FSDP for each in layout.of(Replicate))
    return layout.has(Pipeline) and (layout.has(FSDP2) or replicates)


def defers_reduction(training: Training, layout: Layout) -> bool:
    """Whether only the last `step()` call in a training step reduces gradients of FSDP stages (`finalize_gradients`).

    This needs one schedule for all microbatches, so they must have the same number of rows.
    """
    waits = has_fsdp_stages(layout) and any(getattr(each, "no_sync", False) for each in layout.parallelisms)
    rows = training.data.microbatches
    return waits and len(rows) > 1 and len(set(rows)) == 1 and is_torch_in(FINALIZES_GRADIENTS)


def has_ddp_stages(layout: Layout) -> bool:
    """Whether pipeline stages are `DistributedDataParallel` modules.

    The schedule then reduces gradients in a stage's last backward.
    """
    return layout.has(Pipeline) and layout.has(DDP)


def has_replicate_ddp_stages(layout: Layout) -> bool:
    """Whether `replicate` reduces the stages' gradients by DDP's hooks. The schedule does not recognise such stages."""
    return layout.has(Pipeline) and any(each.implementation is Replicator.DDP for each in layout.of(Replicate))


def stages_without_training(model: Model, layout: Layout, step: int) -> set[int]:
    """Return the stages that use no trained parameter in a step."""
    stages, last = stage_of_layers(layout, len(model.layers)), num_stages(layout) - 1
    found = {stage for stage, is_trained in zip(stages, trained_layers(model, step), strict=True) if is_trained}
    trains_embedding = model.source is not None and not model.source.frozen
    if trains_embedding:
        found.add(0)
    if model.scale or head_parameters(model) or (is_tied(model) and trains_embedding):
        found.add(last)
    return set(range(last + 1)) - found


def has_lost_gradients(layout: Layout) -> bool:
    """Whether stages are resharded after forward, and the schedule computes weight gradients in a separate pass.

    These weight gradients then get lost.
    """
    is_split = any(pipeline.schedule in SPLIT for pipeline in layout.of(Pipeline))
    return is_split and any(fsdp.reshard_after_forward for fsdp in layout.of(FSDP2))


def trained_layers(model: Model, step: int = 0) -> tuple[bool, ...]:
    """Return for each layer whether it uses a trained parameter in a step. If so, its output needs a gradient.

    The default, step 0, uses every parameter that any step uses.
    """
    return tuple(trains_layer(model, index, step) for index in range(len(model.layers)))
