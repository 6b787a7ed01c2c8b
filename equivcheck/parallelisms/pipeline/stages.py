"""Which layers and stages a rank of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.limits.limit import parallelism_of
from equivcheck.scenario import AnyLayer, AuxiliaryLinear, Layout, Model, Pipeline, PipelineSchedule
from equivcheck.scenario.mesh import PP

ALWAYS_SPLIT = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
"""Schedules that compute gradients of inputs and of weights apart, for every chunk."""


def stages_of_rank(pipeline: Pipeline, rank: int, ranks: int) -> tuple[int, ...]:
    """The stages of one of so many ranks, in rising order: round the ranks, or down and up again."""
    if pipeline.schedule.is_v:
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * pipeline.stages_per_rank, ranks))


def layers_of_stages(pipeline: Pipeline, ranks: int, num_layers: int) -> tuple[range, ...]:
    """The layers of each stage: as the boundaries say, else as even as can be, the first stages one layer longer."""
    if pipeline.boundaries:
        starts: Sequence[int] = (0, *pipeline.boundaries)
    else:
        count = ranks * pipeline.stages_per_rank
        starts = [stage * (num_layers // count) + min(stage, num_layers % count) for stage in range(count)]
    return tuple(range(start, end) for start, end in zip(starts, (*starts[1:], num_layers), strict=True))


def num_stages(layout: Layout) -> int:
    """The stages of a layout that has a pipeline."""
    return layout.mesh.size(PP) * parallelism_of(layout, Pipeline).stages_per_rank


def stage_of_layers(layout: Layout, num_layers: int) -> tuple[int, ...]:
    """Per layer, the stage that has it."""
    spans = layers_of_stages(parallelism_of(layout, Pipeline), layout.mesh.size(PP), num_layers)
    return tuple(stage for stage, layers in enumerate(spans) for _ in layers)


def stages_behind_frozen_layers(model: Model, layout: Layout) -> set[int]:
    """The stages, without the first, of which no layer before is trained, so that their input needs no gradient."""
    if model.source is not None and not model.source.frozen:
        return set()
    stages, trained = stage_of_layers(layout, len(model.layers)), trained_layers(model)
    return {stage for stage in stages if stage and not any(trained[: stages.index(stage)])}


def trained_layers(model: Model) -> tuple[bool, ...]:
    """Per layer, whether it has a trained parameter that takes part in some step, so that its output needs a gradient."""
    return tuple(_is_trained(model, layer) for layer in model.layers)


def _is_trained(model: Model, layer: AnyLayer) -> bool:
    own = layer.shares is None or layer.bias or layer.norm is not None or layer.auxiliary is AuxiliaryLinear.EVEN_STEPS
    shared = layer.shares is not None and not model.layers[layer.shares].frozen
    return (own and not layer.frozen) or shared
