"""Changes to a scenario that avoid a known issue.

If the changed scenario fails as well, the known issue is not the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from equivcheck.layouts.base.limits.repairs import (
    each_layer,
    with_execution,
    with_loss,
    with_model,
    with_options,
    with_plain_experts,
    with_summed_squares,
    with_widths,
    without_frozen,
    without_ties,
)
from equivcheck.layouts.parallelisms.fsdp1.known import replicas_of_one_shard
from equivcheck.layouts.parallelisms.pipeline.views import ends_in_view, ends_of_middle_stages_in_view, without_view
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Checkpointing,
    ClipNorm,
    ClipValue,
    Compile,
    Distribution,
    IgnoredLabels,
    Implementation,
    Layout,
    LocalDataParallel,
    Loss,
    Mesh,
    Norm,
    Pipeline,
    Replicate,
    Scenario,
    Training,
)
from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD, TP

Workaround = Callable[[Scenario], Scenario]

WORKAROUNDS: dict[str, Workaround] = {}
"""Changes by name. Each returns a similar scenario that cannot show the issue."""


def _workaround(change: Workaround) -> Workaround:
    WORKAROUNDS[change.__name__] = change
    return change


def _in_training(change: Callable[[Training], Training]) -> Workaround:
    """Register a change to a training as a workaround."""
    return _workaround(wraps(change)(lambda scenario: replace(scenario, training=change(scenario.training))))


def _in_layouts(change: Callable[[Layout], Layout]) -> Workaround:
    """Register a change to a layout as a workaround. A scenario's layout before a checkpoint changes too."""
    return _workaround(wraps(change)(lambda scenario: _change_layouts(scenario, change)))


def _change_layouts(scenario: Scenario, change: Callable[[Layout], Layout]) -> Scenario:
    resume = scenario.resume and replace(scenario.resume, layout=change(scenario.resume.layout))
    return replace(scenario, layout=change(scenario.layout), resume=resume)


@_workaround
def plain_implementation(scenario: Scenario) -> Scenario:
    """Update one parameter after another in the optimizer, and do not compile whole steps."""
    optimizer = replace(scenario.training.optimizer, implementation=Implementation.FOR_LOOP)
    scenario = replace(scenario, training=replace(scenario.training, optimizer=optimizer))
    return _change_layouts(scenario, lambda layout: with_execution(layout, whole_step=False))


@_in_layouts
def no_inductor_cache(layout: Layout) -> Layout:
    """Compile in memory with Dynamo and AOTAutograd, instead of Inductor with its disk cache."""
    is_changed = layout.execution.compile is Compile.INDUCTOR
    return with_execution(layout, compile=Compile.AOT_EAGER) if is_changed else layout


@_in_layouts
def forward_not_compiled(layout: Layout) -> Layout:
    """Run every forward without `torch.compile`."""
    return with_execution(layout, compile=Compile.NONE, per_layer=False)


@_in_layouts
def no_checkpointing(layout: Layout) -> Layout:
    """Switch activation checkpointing off."""
    return with_execution(layout, checkpointing=Checkpointing.NONE)


@_in_training
def summed_outputs(training: Training) -> Training:
    """Use the sum over all differences (output minus target) as loss, instead of their mean."""
    return replace(training, loss=Loss.LINEAR_SUM)


@_in_training
def summed_squares(training: Training) -> Training:
    """Use a loss that sums squared errors instead of averaging them, and a lower learning rate."""
    return with_summed_squares(training)


@_in_training
def squared_loss(training: Training) -> Training:
    """Use a loss that sums squared errors instead of outputs."""
    return with_summed_squares(training, also_linear=True)


@_in_training
def nothing_frozen(training: Training) -> Training:
    """Freeze no layer."""
    return without_frozen(training)


@_in_training
def no_shared_weights(training: Training) -> Training:
    """Share no weight between layers."""
    return without_ties(training)


@_in_training
def all_labels_count(training: Training) -> Training:
    """Ignore no label, also at the ends of documents."""
    return with_model(with_loss(training, ignored=IgnoredLabels.NONE), document_length=None)


@_in_training
def no_label_smoothing(training: Training) -> Training:
    """Switch label smoothing off."""
    return with_loss(training, label_smoothing=0.0)


@_in_training
def not_clipped(training: Training) -> Training:
    """Clip no gradients."""
    return replace(training, clipping=None)


@_in_training
def clipped_by_squares(training: Training) -> Training:
    """Clip gradients by the 2-norm."""
    clipping = training.clipping
    largest = clipping.clip_value if isinstance(clipping, ClipValue) else clipping.max_norm if clipping else ClipNorm().max_norm
    return replace(training, clipping=ClipNorm(max_norm=largest))


@_in_training
def layer_norms(training: Training) -> Training:
    """Use LayerNorm for all norms."""
    head = training.model.head
    changed = each_layer(training, lambda _, layer: layer.with_fields(norm=layer.norm and Norm.LAYER))
    return with_model(changed, head=head and replace(head, norm=head.norm and Norm.LAYER))


@_workaround
def no_views(scenario: Scenario) -> Scenario:
    """Change each layer that returns a view, so that it returns a new tensor."""
    model = scenario.training.model
    layers = (
        without_view(layer) if any(ends_in_view(model, index, layout) for layout in scenario.layouts) else layer
        for index, layer in enumerate(model.layers)
    )
    return replace(scenario, training=with_model(scenario.training, layers=tuple(layers)))


@_workaround
def no_views_of_middle_stages(scenario: Scenario) -> Scenario:
    """Change each pipeline stage between the first and the last that returns a view, so that it returns a new tensor."""
    training, layouts = scenario.training, (layout for layout in scenario.layouts if layout.has(Pipeline))
    ends = {index for layout in layouts for index in ends_of_middle_stages_in_view(training.model, layout)}
    changed = each_layer(training, lambda index, layer: without_view(layer) if index in ends else layer)
    return replace(scenario, training=changed)


@_in_training
def rows_along_first_dim(training: Training) -> Training:
    """Put rows along dim 0 of the inputs."""
    return replace(training, data=replace(training.data, batch_dim=0))


@_in_training
def microbatches_of_one_size(training: Training) -> Training:
    """Give all microbatches as many rows as the first."""
    rows = training.data.microbatches
    return replace(training, data=replace(training.data, microbatches=rows[:1] * len(rows)))


@_in_training
def no_size_of_one(training: Training) -> Training:
    """Raise features, layers' widths and microbatches' rows to two, if they are one."""
    model = training.model
    layers = tuple(layer.with_fields(width=max(width, 2)) for layer, width in zip(model.layers, model.widths[1:], strict=True))
    training = with_model(training, features=max(model.features, 2), layers=layers)
    rows = tuple(max(rows, 2) for rows in training.data.microbatches)
    return replace(training, data=replace(training.data, microbatches=rows))


@_workaround
def even_shards(scenario: Scenario) -> Scenario:
    """Make features, widths and numbers of experts multiples of the number of ranks that shard them."""
    # FSDP2 shards the parts of tensor or expert parallelism once more.
    sizes = (each.mesh.size(TP, EP) * (each.mesh.size(DP, SHARD) if each.has(FSDP2) else 1) for each in scenario.layouts)
    parts = math.lcm(*sizes)
    return replace(scenario, training=with_widths(scenario.training, parts))


@_in_training
def twice_the_rows(training: Training) -> Training:
    """Double the number of rows in each microbatch."""
    microbatches = tuple(2 * rows for rows in training.data.microbatches)
    return replace(training, data=replace(training.data, microbatches=microbatches))


@_in_layouts
def redistributed_gradients(layout: Layout) -> Layout:
    """Redistribute gradients to the placements of their parameters, in DTensor SPMD."""
    return with_options(layout, SPMD, redistribute_gradients=True)


@_in_layouts
def whole_parameters(layout: Layout) -> Layout:
    """Replicate parameters in DTensor SPMD, so that propagation shards only rows."""
    return with_options(layout, SPMD, distribution=Distribution.REPLICATE)


@_in_layouts
def each_backward_synced(layout: Layout) -> Layout:
    """Let DDP reduce gradients in each backward."""
    return with_options(layout, DDP, no_sync=False)


@_in_layouts
def given_stage_shapes(layout: Layout) -> Layout:
    """Give pipeline stages their shapes, so that they infer none."""
    return with_options(layout, Pipeline, static_shapes=True)


@_in_layouts
def gradients_averaged_explicitly(layout: Layout) -> Layout:
    """Average gradients after the last backward, instead of by hooks of DDP."""
    around = (LocalDataParallel() if isinstance(each, DDP | Replicate) else each for each in layout.parallelisms)
    return replace(layout, parallelisms=tuple(around))


@_in_layouts
def original_parameters(layout: Layout) -> Layout:
    """Set `use_orig_params=True` in FSDP1."""
    return with_options(layout, FSDP1, use_orig_params=True)


@_workaround
def shards_for_replicas(scenario: Scenario) -> Scenario:
    """Give FSDP1 one replica with several shards, instead of several replicas with one shard."""

    def swap_axis_sizes(layout: Layout) -> Layout:
        if not replicas_of_one_shard(replace(scenario, layout=layout, resume=None)):
            return layout
        sizes = {REPLICATE: 1, SHARD: layout.mesh.size(REPLICATE)}
        axes = tuple(replace(axis, size=sizes.get(axis.name, axis.size)) for axis in layout.mesh.axes)
        return replace(layout, mesh=Mesh(axes=axes))

    return _change_layouts(scenario, swap_axis_sizes)


@_in_layouts
def sharded_along_rows(layout: Layout) -> Layout:
    """Let FSDP2 shard parameters along their first dim."""
    return with_options(layout, FSDP2, shard_last_dim=False, shard_largest_dim=False)


@_in_layouts
def all_reduced_each_time(layout: Layout) -> Layout:
    """Let FSDP2 reduce gradients over replicas after each microbatch."""
    return with_options(layout, FSDP2, all_reduce_once=False)


@_in_layouts
def nothing_resharded(layout: Layout) -> Layout:
    """Let FSDP2 keep full parameters after forward."""
    return with_options(layout, FSDP2, reshard_after_forward=False, reshard_to=None)


@_in_layouts
def divided_by_ranks(layout: Layout) -> Layout:
    """Let FSDP2 divide gradient sums by the number of ranks, and store experts as plain tensors."""
    divided = with_options(layout, FSDP2, gradient_divide_factor=None)
    return with_plain_experts(divided) if layout.has(FSDP2) else divided


@_in_layouts
def plain_experts(layout: Layout) -> Layout:
    """Store experts as plain tensors."""
    return with_plain_experts(layout)
