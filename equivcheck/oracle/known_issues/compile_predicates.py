"""Predicates on compiled scenarios, for the field `needs` of known issues."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, repeat

from equivcheck.layouts.base.known_predicates import need
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.base.plan.rules import cuts
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    Attention,
    AuxiliaryLinear,
    Checkpointing,
    Compile,
    Layout,
    Parallelism,
    Replicate,
    Replicator,
    Scenario,
    Split,
    TensorParallel,
    Wrapping,
    ZeroGrad,
)
from equivcheck.scenario.mesh import TP


@need
def compiled_original_parameters(scenario: Scenario) -> bool:
    """Whether FSDP1 has `use_orig_params`, and the forward is compiled."""
    keeps = any(parallelism.use_orig_params for parallelism in scenario.layout.of(FSDP1))
    return keeps and scenario.layout.execution.compile is not Compile.NONE


@need
def recompiled_with_gradients(scenario: Scenario) -> bool:
    """Whether the forward is compiled again while parameters have gradients.

    This happens if microbatches have different sizes. It also happens if a layer runs its second linear at even steps only, and
    `zero_grad` sets gradients to zero instead of None.
    """
    training = scenario.training
    alternates = training.steps > 1 and any(layer.auxiliary is AuxiliaryLinear.EVEN_STEPS for layer in training.model.layers)
    return len(set(training.data.microbatches)) > 1 or (alternates and training.zero_grad is ZeroGrad.ZERO)


@need
def compiled_by_inductor(scenario: Scenario) -> bool:
    """Whether inductor compiles the forward, so the compiled code is cached on disk."""
    return scenario.layout.execution.compile is Compile.INDUCTOR


@need
def compiled_units_over_tensor_parallel(scenario: Scenario) -> bool:
    """Whether several layers with DTensors are compiled together, and each is an FSDP1 unit with `use_orig_params`."""
    layout = scenario.layout
    has_units = any(
        parallelism.use_orig_params and parallelism.wrapping is Wrapping.PER_LAYER for parallelism in layout.of(FSDP1)
    )
    return has_units and _compiles_whole(layout) and layout.has(TensorParallel) and len(scenario.training.model.layers) > 1


@need
def compiled_units_among_others_over_tensor_parallel(scenario: Scenario) -> bool:
    """Whether several layers with DTensors are compiled together, and each is a unit in FSDP1, FSDP2 or `replicate`."""
    layout = scenario.layout
    wrapped = any(
        isinstance(each, FSDP1 | FSDP2 | Replicate) and each.wrapping is Wrapping.PER_LAYER for each in layout.parallelisms
    )
    return wrapped and _compiles_whole(layout) and layout.has(TensorParallel) and len(scenario.training.model.layers) > 1


@need
def shards_heads_of_symbolic_width(scenario: Scenario) -> bool:
    """Whether an attention layer's heads are sharded and have a symbolic width in compiled code.

    The attention layer must also be trained, and use `scaled_dot_product_attention` or repeat key and value heads. Its backward
    then computes a DTensor's full size from the ranks' sizes.
    """
    return scenario.layout.mesh.size(TP) > 1 and any(
        split is Split.HEADS_OR_HIDDEN and not layer.frozen and (layer.fused or layer.num_heads > layer.num_kv_heads)
        for layer, split in _heads_of_symbolic_width(scenario)
    )


@need
def transposes_heads_of_symbolic_width(scenario: Scenario) -> bool:
    """Whether attention heads have a symbolic width in compiled code, and transposed gradients have strides with this width."""
    several_ranks = scenario.layout.mesh.size(TP) > 1
    return any(
        (several_ranks and split is Split.HEADS_OR_HIDDEN)
        or (split is not Split.NOT_IN_PLAN and not layer.fused and not layer.rotary)
        for layer, split in _heads_of_symbolic_width(scenario)
    )


def _heads_of_symbolic_width(scenario: Scenario) -> Iterator[tuple[Attention, Split]]:
    """Yield attention layers that are compiled with a symbolic head width, and their split in the plan.

    Dynamo treats numbers in a module as constants, except in an FSDP unit. In such a unit, the width becomes symbolic once
    another unit had another width. A width of 1 stays constant.
    """
    layout, training = scenario.layout, scenario.training
    if not (_compiles_whole(layout) and any(map(_makes_units, layout.parallelisms))):
        return
    for plan in layout.of(TensorParallel):
        entries = zip(training.model.layers, plan.plan, strict=True)
        attentions = [(layer, entry.split) for layer, entry in entries if isinstance(layer, Attention)]
        for index, (layer, split) in enumerate(attentions):
            seen = attentions if len(set(training.data.microbatches)) > 1 else attentions[:index]
            if layer.head_dim > 1 and any(other.head_dim != layer.head_dim for other, _ in seen):
                yield layer, split


def _makes_units(parallelism: Parallelism) -> bool:
    if not isinstance(parallelism, FSDP1 | FSDP2) or parallelism.wrapping is not Wrapping.PER_LAYER:
        return False
    return isinstance(parallelism, FSDP2) or parallelism.use_orig_params


@need
def compiled_embedding_over_tensor_parallel(scenario: Scenario) -> bool:
    """Whether the embedding is a DTensor, and compiled together with the layers."""
    is_spread = any(plan.source is not Split.NOT_IN_PLAN for plan in scenario.layout.of(TensorParallel))
    return _compiles_whole(scenario.layout) and scenario.training.model.source is not None and is_spread


@need
def compiled_fused_attention_is_recomputed(scenario: Scenario) -> bool:
    """Whether a compiled layer with `scaled_dot_product_attention` is recomputed in backward."""
    execution, layers = scenario.layout.execution, scenario.training.model.layers
    is_compiled = execution.compile is not Compile.NONE and execution.checkpointing is not Checkpointing.NONE
    return is_compiled and any(isinstance(layer, Attention) and layer.fused for layer in layers)


@need
def compiled_for_several_sizes(scenario: Scenario) -> bool:
    """Whether the compiled forward over all layers gets several microbatch sizes."""
    return len(set(scenario.training.data.microbatches)) > 1 and _compiles_whole(scenario.layout)


def _compiles_whole(layout: Layout) -> bool:
    return layout.execution.compile is not Compile.NONE and not layout.execution.per_layer


@need
def compiled_with_equal_shards(scenario: Scenario) -> bool:
    """Whether compiled layers have two sharded dims with different sizes, and both have equally large shards on some rank."""
    layout, ranks = scenario.layout, scenario.layout.mesh.size(TP)
    sizes = {size for parallelism in layout.of(TensorParallel) for _, size in cuts(scenario.training.model, parallelism)}
    compiles = layout.execution.compile is not Compile.NONE
    return compiles and any(map(_has_equal_chunks, combinations(sizes, 2), repeat(ranks)))


@need
def compiled_layers_between_ddp_and_tensor_parallel(scenario: Scenario) -> bool:
    """Whether DDP is applied over tensor parallelism, and layers are compiled one by one."""
    layout = scenario.layout
    swaps = layout.has(DDP) or any(each.implementation is Replicator.DDP for each in layout.of(Replicate))
    compiles = layout.execution.compile is not Compile.NONE and layout.execution.per_layer
    return swaps and compiles and layout.has(TensorParallel)


@need
def reruns_layer_next_to_others(scenario: Scenario) -> bool:
    """Whether there are several steps, and the model has several layers or activation checkpointing.

    Each layer then runs again after an optimizer update.
    """
    among = len(scenario.training.model.layers) > 1 or scenario.layout.execution.checkpointing is not Checkpointing.NONE
    return scenario.training.steps > 1 and among


def _has_equal_chunks(sizes: tuple[int, int], ranks: int) -> bool:
    first, second = (chunk_sizes(size, ranks) for size in sizes)
    return any(one == other for one, other in zip(first, second, strict=True))
