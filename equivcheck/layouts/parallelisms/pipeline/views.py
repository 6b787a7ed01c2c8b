"""Find stages that return views. Schedules that split the backward refuse views."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.parallelisms.pipeline.stages import layers_of_stages
from equivcheck.scenario import AnyLayer, ExpertParallel, Experts, Layout, Model, Pipeline, PlannedParallelism, ShapeOp, Split
from equivcheck.scenario.mesh import PP

ENDS_IN_VIEW = (ShapeOp.FLATTEN, ShapeOp.SQUEEZE, ShapeOp.VIEW)
"""Shape operations that make a layer's output a view."""


def ends_of_middle_stages_in_view(model: Model, layout: Layout) -> tuple[int, ...]:
    """Return the last layers of the stages between the first and the last, if these stages return views."""
    pipeline = parallelism_of(layout, Pipeline)
    if pipeline.sends_dtensors:
        return ()
    spans = layers_of_stages(pipeline, layout.mesh.size(PP), len(model.layers))
    return tuple(span[-1] for span in spans[1:-1] if ends_in_view(model, span[-1], layout))


def ends_in_view(model: Model, index: int, layout: Layout) -> bool:
    """Whether a layer's output is a view.

    This holds after some shape operations, after a linear with a bias on sequences, after a linear whose output is the local
    tensor of a DTensor, and after experts that exchange rows between ranks.
    """
    layer = model.layers[index]
    is_flattened = model.length is not None and layer.bias and layer.ends_in_linear
    is_local = layer.ends_in_linear and any(
        each.returns_local_tensors and index < len(each.plan) and each.plan[index].split is not Split.NOT_IN_PLAN
        for each in layout.of(PlannedParallelism)
    )
    return layer.shape_op in ENDS_IN_VIEW or is_flattened or is_local or _puts_rows_back(layer, layout)


def _puts_rows_back(layer: AnyLayer, layout: Layout) -> bool:
    """Whether the last operation puts rows back into the shape that they had before they were sent to experts."""
    return isinstance(layer, Experts) and layer.ends_in_routed_sum and (layer.dispatched or layout.has(ExpertParallel))


def without_view(layer: AnyLayer) -> AnyLayer:
    """Change a layer that returns a view, so that it returns a new tensor. Dropout multiplies the layer's output by a mask."""
    if isinstance(layer, Experts):
        return replace(layer, residual=True)
    return layer.with_fields(shape_op=None, dropout=layer.dropout or 0.25)
