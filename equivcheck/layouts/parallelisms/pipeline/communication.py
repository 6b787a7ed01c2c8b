"""Expected pipeline collectives: connections, shared weights' gradients, and the gradient norm. Sends are not predicted."""

from __future__ import annotations

import math
from dataclasses import replace

from equivcheck.layouts.base.dtensor_experts import shards_over_ep
from equivcheck.layouts.base.expected_calls.communication import Totals, axes_of
from equivcheck.layouts.base.expected_calls.model import CommunicationModel, Unpredicted
from equivcheck.layouts.base.expected_calls.passes import Span
from equivcheck.layouts.base.expected_calls.rank_view import Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import one_norm
from equivcheck.layouts.base.partition import local_shape
from equivcheck.layouts.base.plan.rules import norms_made_trainable
from equivcheck.layouts.parallelisms.pipeline.stages import (
    INFERS_BACKWARD,
    SharedWeight,
    defers_reduction,
    has_ddp_stages,
    has_replicate_ddp_stages,
    layers_of_stages,
    rank_of_stages,
    splits_backward,
    stages_of_rank,
    uses_weight_twice,
    weights_of_several_ranks,
)
from equivcheck.scenario import DDP, Layout, Pipeline, Replicate, StagePosition, Training
from equivcheck.scenario.mesh import EP, PP, REPLICATE, TP
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
    line, coordinates = _line(view), dict(zip(view.layout.mesh.names, view.coordinate, strict=True))
    parameters = {held.parameter.full_name: held.parameter for held in view.held}
    for weight in _copied(view, pipeline):
        num_bytes = math.prod(local_shape(view.layout, parameters[weight.name], coordinates)) * view.item_bytes
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


def _restrict_to_stages(view: RankView, pipeline: Pipeline) -> RankView:
    """Return the rank with its stages and their parameters, including weights that are copies."""
    counting = {weight.name: weight.first_rank == view.index(PP) for weight in _copied(view, pipeline)}
    stages = stages_of_rank(pipeline, view.index(PP), view.layout.mesh.size(PP))
    spans = tuple(_span(view, pipeline, stage) for stage in stages)
    held = tuple(
        replace(held, counts_in_norm=counting.get(held.parameter.full_name, True))
        for held in view.held
        if held.parameter.full_name in counting or any(span.holds(held.parameter) for span in spans)
    )
    return replace(view, held=held, spans=spans)


def _span(view: RankView, pipeline: Pipeline, stage: int) -> Span:
    layers = layers_of_stages(pipeline, view.layout.mesh.size(PP), len(view.training.model.layers))
    knows_gradients = is_torch_in(INFERS_BACKWARD)
    is_differentiated = any(view.differentiates(layers[stage].start - 1, step) for step in range(view.training.steps))
    return Span(
        layers=layers[stage],
        is_first=stage == 0,
        is_last=stage == len(layers) - 1,
        differentiates_input=stage > 0 and (is_differentiated or not knows_gradients),
        infers_shapes=not pipeline.static_shapes,
        infers_gradients=knows_gradients,
    )


def num_fsdp_reductions(view: RankView, step: int, *, no_sync: bool) -> int:
    """Return how often `fully_shard` or `replicate_with_fsdp` reduces gradients in a step.

    It does so after each microbatch, or after the last one only. A pipeline's chunks do not count as microbatches.
    """
    is_once = no_sync and (not view.layout.has(Pipeline) or defers_reduction(view.training, view.layout))
    return 1 if is_once else len(view.training.microbatches_at(step))


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


def _axes_inside(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes of parallelisms inside stages."""
    inside = (each for each in layout.parallelisms if each.stage_position is StagePosition.INSIDE)
    return tuple(name for each in inside for name in layout.axes_of(each))


def _runs_layers_in_several_passes(training: Training, layout: Layout) -> bool:
    """Whether layers inside stages communicate, and both passes of a split backward may run through them."""
    is_checkpointed = any(map(layout.execution.checkpoints, range(len(training.model.layers))))
    if not (splits_backward(layout) and _axes_inside(layout)):
        return False
    return is_checkpointed or any(uses_weight_twice(training.model, each, layout.mesh.size(PP)) for each in layout.of(Pipeline))


def _axes_of_wrapped_stages(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes over which stages reduce their own gradients."""
    axes = tuple(name for each in layout.parallelisms if each.reduces_each_module for name in layout.axes_of(each))
    return (*axes, EP) if shards_over_ep(layout) else axes


def _axes_of_replicas(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes along which stages that reduce their own gradients have replicas."""
    return tuple(name for name in _axes_of_wrapped_stages(layout) if name == REPLICATE)


def _reduces_copies(training: Training, layout: Layout) -> bool:
    """Whether DDP or `replicate` reduces stages, and several ranks have copies of a weight."""
    pipelines = layout.of(Pipeline) if layout.has(DDP, Replicate) else ()
    return any(weights_of_several_ranks(training.model, each, layout.mesh.size(PP)) for each in pipelines)


def _reduces_chunks(layout: Layout) -> bool:
    """Whether DDP's hooks on stages reduce another chunk's gradients than the last one's, or not all gradients."""
    if has_replicate_ddp_stages(layout):
        return layout.num_chunks > 1 or splits_backward(layout)
    infers = any(not pipeline.static_shapes for pipeline in layout.of(Pipeline))
    return has_ddp_stages(layout) and (splits_backward(layout) or (infers and layout.num_chunks > 1))


PIPELINE_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    restrict=_restrict_to_stages,
    sends_shards=True,
    unmodelled=(
        Unpredicted(
            reason="pipeline: sends and receives between stages are not predicted: they depend on the schedule; collectives are "
            "predicted",
            applies=lambda _training, _layout: True,
            ops=frozenset(("send", "recv")),
            axes=lambda _layout: (PP,),
        ),
        Unpredicted(
            reason="pipeline: gathers and reductions of stages that reduce their own gradients are not predicted: the schedule "
            "decides when they happen",
            applies=lambda _training, layout: bool(_axes_of_wrapped_stages(layout)),
            ops=frozenset(("all_gather", "reduce_scatter.avg", "reduce_scatter.sum")),
            axes=_axes_of_wrapped_stages,
        ),
        Unpredicted(
            reason="pipeline: calls of tensor, context or expert parallelism inside stages are not predicted if the schedule "
            "splits the backward, and layers are checkpointed or share a weight: both of its passes may run through such layers",
            applies=_runs_layers_in_several_passes,
            axes=_axes_inside,
        ),
        Unpredicted(
            # Other schedules keep the norm's gradient, so the check reports the known issue before it compares calls.
            reason="pipeline: calls of tensor parallelism are not predicted if SequenceParallel makes a frozen norm trainable, "
            "and the schedule splits the backward: later stages compute input gradients, but the schedule may drop the norm's "
            "own gradient",
            applies=lambda training, layout: splits_backward(layout) and bool(norms_made_trainable(training.model, layout)),
            axes=lambda _layout: (TP,),
        ),
        Unpredicted(
            reason="pipeline: all-reduces over replicas of stages that reduce their own gradients are not predicted: the "
            "schedule decides when they happen",
            applies=lambda _training, layout: bool(_axes_of_replicas(layout)),
            ops=frozenset(("all_reduce.avg", "all_reduce.sum")),
            axes=_axes_of_replicas,
        ),
        Unpredicted(
            reason="pipeline: calls of DDP or replicate stages are not predicted if a weight has copies on several ranks: copies "
            "have other places in the stages' buckets than the weight in the model",
            applies=_reduces_copies,
            axes=_axes_of_wrapped_stages,
        ),
        Unpredicted(
            reason="pipeline: calls of DDP's hooks are not predicted under schedules that split the backward, or with "
            "several chunks of inferred shapes or of replicate stages: the hooks then reduce after other backward passes than "
            "the last one",
            applies=lambda _training, layout: _reduces_chunks(layout),
            axes=_axes_of_wrapped_stages,
        ),
    ),
)
