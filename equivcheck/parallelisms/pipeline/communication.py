"""What a pipeline communicates beside what stages send and receive: gradients of shared weights, and the norm of all stages."""

from __future__ import annotations

import math
from dataclasses import fields

from equivcheck.layouts.expected_calls.communication import Totals, axes_of
from equivcheck.layouts.expected_calls.model import CommunicationModel, Unmodelled
from equivcheck.layouts.expected_calls.rank_view import Ledger, RankView
from equivcheck.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.scenario import ClipNorm, NormType, Pipeline
from equivcheck.scenario.mesh import PP
from equivcheck.trace.stage import Stage


def _all_calls(view: RankView, pipeline: Pipeline) -> Totals:
    return _exchanges(view, pipeline) | _clipping(view)


def _exchanges(view: RankView, pipeline: Pipeline) -> Totals:
    """One sum a step of the gradients of each trained weight of which this rank has one of several copies."""
    ledger, mesh = Ledger(), view.layout.mesh
    shapes = {held.parameter.full_name: held.shape for held in view.held}
    for weight in weights_of_several_ranks(view.training.model, pipeline, mesh.size(PP)):
        if weight.trained and view.index(PP) in weight.ranks:
            num_bytes = math.prod(shapes[weight.name]) * view.item_bytes
            for step in range(view.training.steps):
                ledger.note(step, "all_reduce.sum", axes_of(weight.ranks, mesh), num_bytes)
    return ledger.totals


def _clipping(view: RankView) -> Totals:
    clipping, ledger = view.training.clipping, Ledger(Stage.CLIPPING)
    if isinstance(clipping, ClipNorm):
        op = "all_reduce.max" if clipping.norm_type is NormType.INF else "all_reduce.sum"
        for step in range(view.training.steps):
            ledger.note(step, op, view.axes(PP), view.item_bytes)
    return ledger.totals


PIPELINE_COMMUNICATION = CommunicationModel(
    options=frozenset(field.name for field in fields(Pipeline)),
    calls=_all_calls,
    uneven=lambda _pipeline: True,
    unmodelled=(
        Unmodelled(
            reason="pipeline: what stages send and receive depends on the schedule, which is not modelled; collectives are",
            applies=lambda _training, _layout: True,
            ops=frozenset(("send", "recv")),
        ),
    ),
)
