"""Limits for checkpointed layers under schedules that split the backward."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.limits.repairs import with_equal_experts
from equivcheck.layouts.base.partition import is_last_shard_empty
from equivcheck.layouts.parallelisms.pipeline.stages import splits_backward, stage_of_layers
from equivcheck.scenario import Checkpointing, Layout, Training
from equivcheck.scenario.mesh import EP
from equivcheck.training.layers.parameters import parameters_of


def _lacks_experts_to_recompute(training: Training, layout: Layout) -> bool:
    """Whether a rank holds no expert of a trained, checkpointed layer whose backward the schedule splits."""
    ranks, stages = layout.mesh.size(EP), stage_of_layers(layout, len(training.model.layers))
    return splits_backward(layout) and any(
        parameter.trained
        and parameter.layer is not None
        # The first stage computes no input gradients, so schedules do not split its backward.
        and stages[parameter.layer] > 0
        and parameter.expert_dim is not None
        and layout.execution.checkpoints(parameter.layer)
        and is_last_shard_empty(parameter.shape[parameter.expert_dim], ranks)
        for parameter in (parameters_of(training.model) if ranks > 1 else ())
    )


RECOMPUTED_ONCE = LayoutLimit(
    reason="pipeline: selective checkpointing with a zero-bubble schedule or DualPipeV is not supported: they compute input and "
    "weight gradients in two backward passes, but torch allows one ('Trying to backward an extra time')",
    applies=lambda layout: layout.execution.checkpointing is Checkpointing.SELECTIVE and splits_backward(layout),
    repair=lambda layout: replace(layout, execution=replace(layout.execution, checkpointing=Checkpointing.EVERY_LAYER)),
)


EXPERTS_TO_RECOMPUTE = Limit(
    reason="pipeline: a rank without any expert of a trained, checkpointed layer behind the first stage is not supported if the "
    "schedule splits the backward: the pass for weights recomputes a layer once for each group of parameters, so this rank joins "
    "fewer all-to-alls than others, and ranks raise or wait forever",
    applies=_lacks_experts_to_recompute,
    repair=lambda training, layout: with_equal_experts(training, layout.mesh.size(EP)),
)
