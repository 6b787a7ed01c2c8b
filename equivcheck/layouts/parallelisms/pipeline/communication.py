"""Expected pipeline collectives: connections, shared weights' gradients, and the gradient norm. Sends are not predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from equivcheck.layouts.base.expected_calls.communication import Totals, axes_of
from equivcheck.layouts.base.expected_calls.model import CommunicationModel, Unpredicted
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import one_norm
from equivcheck.layouts.parallelisms.pipeline.stages import (
    SharedWeight,
    has_ddp_stages,
    has_replicate_ddp_stages,
    layers_of_stages,
    num_stages,
    rank_of_stages,
    splits_backward,
    stages_of_rank,
    weights_of_several_ranks,
)
from equivcheck.scenario import Layout, ParameterOwner, Pipeline, StagePosition, Training
from equivcheck.scenario.mesh import PP, REPLICATE
from equivcheck.system.torch_version import is_torch_in

CONNECTS_AT_ONCE = ">=2.15"
"""Versions whose schedules do two things in their first run: ranks agree on shape inference, and connect neighbouring stages."""
_FLAG_BYTES = 4
"""Bytes in the int32 flag with which neighbouring stages agree on shape inference."""


def _all_calls(view: RankView, pipeline: Pipeline) -> Totals:
    ledger = Ledger()
    if view.layout.mesh.size(PP) > 1 and is_torch_in(CONNECTS_AT_ONCE):
        # Stages connect in the first step, and each number of rows has its own schedule.
        rounds = _num_rounds(pipeline, view.layout.mesh.size(PP))
        for _ in set(view.training.data.microbatches):
            ledger.note(0, "all_reduce.min", view.axes(PP), _FLAG_BYTES)
            ledger.note(0, "all_reduce.sum", view.axes(PP), rounds * _FLAG_BYTES, rounds)
    # Each step sums each trained weight that has copies on several ranks, except empty shards.
    line, shapes = _line(view), {held.parameter.full_name: held.shape for held in view.held}
    for weight in _copied(view, pipeline):
        num_bytes = math.prod(shapes[weight.name]) * view.item_bytes
        if weight.trained and num_bytes:
            axes = axes_of(tuple(line[number] for number in weight.ranks), view.layout.mesh)
            for step in range(view.training.steps):
                ledger.note(step, "all_reduce.sum", axes, num_bytes)
    return ledger.totals | one_norm(view, view.axes(PP), view.item_bytes)


def _line(view: RankView) -> tuple[int, ...]:
    """Return the global ranks in the rank's pipeline."""
    mesh, number = view.layout.mesh, view.index(PP)
    return next(line for line in mesh.lines(PP) if mesh.coordinate(line[number]) == view.coordinate)


def _copied(view: RankView, pipeline: Pipeline) -> tuple[SharedWeight, ...]:
    """Return the weights with copies on this rank and on other ranks."""
    found = weights_of_several_ranks(view.training.model, pipeline, view.layout.mesh.size(PP))
    return tuple(weight for weight in found if view.index(PP) in weight.ranks)


def _held(view: RankView, pipeline: Pipeline) -> tuple[Held, ...]:
    """Return the parameters in the rank's stages, and copies of other ranks' weights."""
    stages = _stages(view, pipeline)
    copied = {weight.name for weight in _copied(view, pipeline)}
    return tuple(
        held
        for held in view.held
        if held.parameter.full_name in copied or any(_is_in_stage(view, pipeline, held, stage) for stage in stages)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One module that data parallelism wraps: a pipeline stage, or the whole model if there is no pipeline."""

    view: RankView
    """The rank with this module's parameters only."""
    is_last: bool = True
    """Whether the module computes the model's outputs."""


def stage_views(view: RankView) -> tuple[StageView, ...]:
    """Return the modules that data parallelism wraps on a rank."""
    last = num_stages(view.layout) - 1 if view.layout.has(Pipeline) else None
    return tuple(
        StageView(
            view=replace(view, held=tuple(held for held in view.held if _is_in_stage(view, pipeline, held, stage))),
            is_last=stage == last,
        )
        for pipeline in view.layout.of(Pipeline)
        for stage in _stages(view, pipeline)
    ) or (StageView(view=view),)


def _stages(view: RankView, pipeline: Pipeline) -> tuple[int, ...]:
    return stages_of_rank(pipeline, view.index(PP), view.layout.mesh.size(PP))


def _is_in_stage(view: RankView, pipeline: Pipeline, held: Held, stage: int) -> bool:
    """Whether a stage has a parameter of its own layers, of the embedding (first stage), or of the head or model (last stage)."""
    spans = layers_of_stages(pipeline, view.layout.mesh.size(PP), len(view.training.model.layers))
    owners = {ParameterOwner.SOURCE: 0, ParameterOwner.HEAD: len(spans) - 1, ParameterOwner.MODEL: len(spans) - 1}
    return held.layer in spans[stage] or owners.get(held.parameter.owner) == stage


def _num_rounds(pipeline: Pipeline, ranks: int) -> int:
    """Return in how many rounds ranks with neighbouring stages meet.

    Each pair meets in the first round in which both are free.
    """
    of_stage = rank_of_stages(pipeline, ranks)
    pairs = {tuple(sorted((of_stage[stage - 1], of_stage[stage]))) for stage in range(1, len(of_stage))}
    rounds: list[set[int]] = []
    for pair in sorted(pair for pair in pairs if pair[0] != pair[1]):
        met = next((met for met in rounds if met.isdisjoint(pair)), None)
        if met is None:
            rounds.append(set(pair))
        else:
            met.update(pair)
    return len(rounds)


_OF_LAYERS = frozenset(("all_gather", "all_to_all", "all_reduce.max", "all_reduce.sum", "reduce_scatter.sum"))
"""Operations with which parallelisms inside stages move activations, reduce gradients and combine norms."""


def _axes_inside(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes of parallelisms inside stages."""
    inside = (each for each in layout.parallelisms if each.stage_position is StagePosition.INSIDE)
    return tuple(name for each in inside for name in layout.axes_of(each))


def _reduces_stages(layout: Layout) -> bool:
    return any(each.reduces_each_module for each in layout.parallelisms)


def _all_reduces_stages(training: Training, layout: Layout) -> bool:
    """Whether stages reduce their own gradients, and have replicas or copies of a weight."""
    copies = (weights_of_several_ranks(training.model, pipeline, layout.mesh.size(PP)) for pipeline in layout.of(Pipeline))
    return _reduces_stages(layout) and (REPLICATE in layout.mesh.names or any(copies))


def _reduces_chunks(layout: Layout) -> bool:
    """Whether DDP's hooks on stages reduce another chunk's gradients than the last one's, or not all gradients."""
    if has_replicate_ddp_stages(layout):
        return layout.num_chunks > 1 or splits_backward(layout)
    infers = any(not pipeline.static_shapes for pipeline in layout.of(Pipeline))
    return has_ddp_stages(layout) and (splits_backward(layout) or (infers and layout.num_chunks > 1))


PIPELINE_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    hold=_held,
    sends_shards=True,
    unmodelled=(
        Unpredicted(
            reason="pipeline: sends and receives of stages are not predicted: they depend on the schedule; collectives are "
            "predicted",
            applies=lambda _training, _layout: True,
            ops=frozenset(("send", "recv")),
        ),
        Unpredicted(
            reason="pipeline: gathers and reductions of stages that reduce their own gradients are not predicted: the schedule "
            "decides when they happen",
            applies=lambda _training, layout: _reduces_stages(layout),
            ops=frozenset(("all_gather", "reduce_scatter.avg", "reduce_scatter.sum")),
        ),
        Unpredicted(
            reason="pipeline: collectives of tensor, context or expert parallelism inside stages are not predicted: each chunk "
            "calls them, and so do passes that infer shapes",
            applies=lambda _training, layout: bool(_axes_inside(layout)),
            ops=_OF_LAYERS,
            axes=_axes_inside,
        ),
        Unpredicted(
            reason="pipeline: all-reduces over replicas or copies of stages that reduce their own gradients are not predicted: "
            "they depend on the schedule and on the shards",
            applies=_all_reduces_stages,
        ),
        Unpredicted(
            reason="pipeline: calls of DDP's hooks are not predicted under schedules that split the backward, or with "
            "several chunks of inferred shapes or of replicate stages: the hooks then reduce after other backward passes than "
            "the last one",
            applies=lambda _training, layout: _reduces_chunks(layout),
        ),
    ),
)
