"""Changes to a scenario that avoid a known issue.

If the changed scenario fails as well, the known issue is not the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from equivcheck.layouts.base.limits.repairs import (
    each_layer,
    with_execution,
    with_loss,
    with_model,
    with_options,
    with_summed_squares,
    with_widths,
    without_frozen,
    without_ties,
)
from equivcheck.layouts.parallelisms.fsdp1.known import replicas_of_one_shard
from equivcheck.layouts.parallelisms.pipeline.known import ends_in_view
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
    ExpertParallel,
    ExpertStorage,
    IgnoredLabels,
    Implementation,
    Layout,
    Loss,
    Mesh,
    Norm,
    Scenario,
    Training,
)
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP

Workaround = Callable[[Scenario], Scenario]

WORKAROUNDS: dict[str, Workaround] = {}
"""Changes by name. Each returns a similar scenario that cannot show the issue."""


def _workaround(change: Workaround) -> Workaround:
    WORKAROUNDS[change.__name__] = change
    return change


def _in_layouts(scenario: Scenario, change: Callable[[Layout], Layout]) -> Scenario:
    # The layout of the first steps, before a checkpoint, changes as well.
    resume = scenario.resume and replace(scenario.resume, layout=change(scenario.resume.layout))
    return replace(scenario, layout=change(scenario.layout), resume=resume)


def _in_training(scenario: Scenario, change: Callable[[Training], Training]) -> Scenario:
    return replace(scenario, training=change(scenario.training))


@_workaround
def plain_implementation(scenario: Scenario) -> Scenario:
    """The optimizer updates one parameter after another, and no whole step is compiled."""
    optimizer = replace(scenario.training.optimizer, implementation=Implementation.FOR_LOOP)
    scenario = _in_training(scenario, lambda training: replace(training, optimizer=optimizer))
    return _in_layouts(scenario, lambda layout: with_execution(layout, whole_step=False))


@_workaround
def no_inductor_cache(scenario: Scenario) -> Scenario:
    """Dynamo and AOTAutograd compile in memory, instead of Inductor with its disk cache."""

    def compile_without_inductor(layout: Layout) -> Layout:
        is_changed = layout.execution.compile is Compile.INDUCTOR
        return with_execution(layout, compile=Compile.AOT_EAGER) if is_changed else layout

    return _in_layouts(scenario, compile_without_inductor)


@_workaround
def forward_not_compiled(scenario: Scenario) -> Scenario:
    """No forward is compiled."""
    return _in_layouts(scenario, lambda layout: with_execution(layout, compile=Compile.NONE, per_layer=False))


@_workaround
def no_checkpointing(scenario: Scenario) -> Scenario:
    """Activation checkpointing is off."""
    return _in_layouts(scenario, lambda layout: with_execution(layout, checkpointing=Checkpointing.NONE))


@_workaround
def summed_outputs(scenario: Scenario) -> Scenario:
    """The loss sums outputs minus targets instead of averaging them."""
    return _in_training(scenario, lambda training: replace(training, loss=Loss.LINEAR_SUM))


@_workaround
def summed_squares(scenario: Scenario) -> Scenario:
    """The loss sums squared errors instead of averaging them, with a lower learning rate."""
    return _in_training(scenario, with_summed_squares)


@_workaround
def nothing_frozen(scenario: Scenario) -> Scenario:
    """No layer is frozen."""
    return _in_training(scenario, without_frozen)


@_workaround
def no_shared_weights(scenario: Scenario) -> Scenario:
    """No weight is shared."""
    return _in_training(scenario, without_ties)


@_workaround
def all_labels_count(scenario: Scenario) -> Scenario:
    """No label is ignored."""
    return _in_training(scenario, lambda training: with_loss(training, ignored=IgnoredLabels.NONE))


@_workaround
def no_label_smoothing(scenario: Scenario) -> Scenario:
    """Label smoothing is off."""
    return _in_training(scenario, lambda training: with_loss(training, label_smoothing=0.0))


@_workaround
def not_clipped(scenario: Scenario) -> Scenario:
    """Gradients are not clipped."""
    return _in_training(scenario, lambda training: replace(training, clipping=None))


@_workaround
def clipped_by_squares(scenario: Scenario) -> Scenario:
    """Gradients are clipped by the 2-norm."""
    clipping = scenario.training.clipping
    largest = clipping.clip_value if isinstance(clipping, ClipValue) else clipping.max_norm if clipping else ClipNorm().max_norm
    return _in_training(scenario, lambda training: replace(training, clipping=ClipNorm(max_norm=largest)))


@_workaround
def layer_norms(scenario: Scenario) -> Scenario:
    """All norms are LayerNorm."""

    def with_layer_norms(training: Training) -> Training:
        head = training.model.head
        changed = each_layer(training, lambda _, layer: layer.with_fields(norm=layer.norm and Norm.LAYER))
        return with_model(changed, head=head and replace(head, norm=head.norm and Norm.LAYER))

    return _in_training(scenario, with_layer_norms)


@_workaround
def no_views(scenario: Scenario) -> Scenario:
    """No layer returns a view."""

    def remove_views(training: Training) -> Training:
        model = training.model
        layers = (
            layer
            if not ends_in_view(model, index)
            else layer.with_fields(**({"shape_op": None} if layer.shape_op else {"bias": False}))
            for index, layer in enumerate(model.layers)
        )
        return with_model(training, layers=tuple(layers))

    return _in_training(scenario, remove_views)


@_workaround
def rows_along_first_dim(scenario: Scenario) -> Scenario:
    """Rows are dim 0 in the inputs."""
    return _in_training(scenario, lambda training: replace(training, data=replace(training.data, batch_dim=0)))


@_workaround
def no_size_of_one(scenario: Scenario) -> Scenario:
    """No feature, width or number of rows is one."""

    def widen(training: Training) -> Training:
        model = training.model
        layers = tuple(
            layer.with_fields(width=max(width, 2)) for layer, width in zip(model.layers, model.widths[1:], strict=True)
        )
        training = with_model(training, features=max(model.features, 2), layers=layers)
        rows = tuple(max(rows, 2) for rows in training.data.microbatches)
        return replace(training, data=replace(training.data, microbatches=rows))

    return _in_training(scenario, widen)


@_workaround
def even_shards(scenario: Scenario) -> Scenario:
    """Features and widths are multiples of the ranks that split them."""
    # FSDP2 shards the parts of tensor parallelism once more.
    sizes = (each.mesh.size(TP) * (each.mesh.size(DP, SHARD) if each.has(FSDP2) else 1) for each in scenario.layouts)
    parts = math.lcm(*sizes)
    return _in_training(scenario, lambda training: with_widths(training, parts))


@_workaround
def redistributed_gradients(scenario: Scenario) -> Scenario:
    """DTensor SPMD redistributes gradients to the placements of their parameters."""
    return _in_layouts(scenario, lambda layout: with_options(layout, SPMD, redistribute_gradients=True))


@_workaround
def whole_parameters(scenario: Scenario) -> Scenario:
    """DTensor SPMD replicates parameters, so propagation shards only rows."""
    return _in_layouts(scenario, lambda layout: with_options(layout, SPMD, distribution=Distribution.REPLICATE))


@_workaround
def each_backward_synced(scenario: Scenario) -> Scenario:
    """DDP reduces in each backward."""
    return _in_layouts(scenario, lambda layout: with_options(layout, DDP, no_sync=False))


@_workaround
def original_parameters(scenario: Scenario) -> Scenario:
    """FSDP1 has `use_orig_params=True`."""
    return _in_layouts(scenario, lambda layout: with_options(layout, FSDP1, use_orig_params=True))


@_workaround
def shards_for_replicas(scenario: Scenario) -> Scenario:
    """FSDP1 has one replica with several shards, instead of several replicas with one shard."""

    def swap_axis_sizes(layout: Layout) -> Layout:
        if not replicas_of_one_shard(replace(scenario, layout=layout, resume=None)):
            return layout
        sizes = {REPLICATE: 1, SHARD: layout.mesh.size(REPLICATE)}
        axes = tuple(replace(axis, size=sizes.get(axis.name, axis.size)) for axis in layout.mesh.axes)
        return replace(layout, mesh=Mesh(axes=axes))

    return _in_layouts(scenario, swap_axis_sizes)


@_workaround
def sharded_along_rows(scenario: Scenario) -> Scenario:
    """FSDP2 shards parameters along their first dim."""
    return _in_layouts(scenario, lambda layout: with_options(layout, FSDP2, shard_last_dim=False))


@_workaround
def divided_by_ranks(scenario: Scenario) -> Scenario:
    """FSDP2 divides gradient sums by the number of ranks, also for experts."""

    def reset_divide_factor(layout: Layout) -> Layout:
        divided = with_options(layout, FSDP2, gradient_divide_factor=None)
        return with_options(divided, ExpertParallel, storage=ExpertStorage.PLAIN) if layout.has(FSDP2) else divided

    return _in_layouts(scenario, reset_divide_factor)


@_workaround
def plain_experts(scenario: Scenario) -> Scenario:
    """Each rank stores its experts as plain tensors."""
    return _in_layouts(scenario, lambda layout: with_options(layout, ExpertParallel, storage=ExpertStorage.PLAIN))
