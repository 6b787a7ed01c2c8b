"""Expected pipeline collectives: connections, shared weights' gradients, and the gradient norm. Sends are not predicted."""

from __future__ import annotations

import math

from equivcheck.layouts.base.expected_calls.communication import Totals, axes_of
from equivcheck.layouts.base.expected_calls.model import CommunicationModel, Unpredicted
from equivcheck.layouts.base.expected_calls.rank_view import Held, Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import one_norm
from equivcheck.layouts.parallelisms.pipeline.stages import (
    SharedWeight,
    layers_of_stages,
    rank_of_stages,
    stages_of_rank,
    weights_of_several_ranks,
)
from equivcheck.scenario import DDP, Layout, ParameterOwner, Pipeline, Replicate, StagePosition, Training
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
    # Each step sums each trained weight that has copies on several ranks.
    line, shapes = _line(view), {held.parameter.full_name: held.shape for held in view.held}
    for weight in _copied(view, pipeline):
        if weight.trained:
            num_bytes = math.prod(shapes[weight.name]) * view.item_bytes
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
    ranks, model = view.layout.mesh.size(PP), view.training.model
    spans, stages = layers_of_stages(pipeline, ranks, len(model.layers)), stages_of_rank(pipeline, view.index(PP), ranks)
    layers = {index for stage in stages for index in spans[stage]}
    owners = {ParameterOwner.SOURCE: 0, ParameterOwner.HEAD: len(spans) - 1, ParameterOwner.MODEL: len(spans) - 1}
    copied = {weight.name for weight in _copied(view, pipeline)}
    return tuple(
        held
        for held in view.held
        if held.parameter.full_name in copied or held.layer in layers or owners.get(held.parameter.owner) in stages
    )


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


def _reduces_stages(layout: Layout) -> bool:
    return any(each.reduces_each_module for each in layout.parallelisms)


def _all_reduces_stages(training: Training, layout: Layout) -> bool:
    """Whether stages reduce their own gradients, and have replicas or copies of a weight."""
    copies = (weights_of_several_ranks(training.model, pipeline, layout.mesh.size(PP)) for pipeline in layout.of(Pipeline))
    return layout.has(DDP, Replicate) or (_reduces_stages(layout) and (REPLICATE in layout.mesh.names or any(copies)))


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
            reason="pipeline: collectives of layers inside stages are not predicted: each chunk communicates, and so do passes "
            "that infer shapes",
            applies=lambda _training, layout: any(each.stage_position is StagePosition.INSIDE for each in layout.parallelisms),
            ops=_OF_LAYERS,
        ),
        Unpredicted(
            reason="pipeline: all-reduces over replicas or copies of stages that reduce their own gradients are not predicted: "
            "they depend on the schedule and on the shards",
            applies=_all_reduces_stages,
        ),
    ),
)
