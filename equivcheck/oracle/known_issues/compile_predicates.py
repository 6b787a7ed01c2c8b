"""What issues on file may ask of a scenario that is compiled."""

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
    Compile,
    Layout,
    Parallelism,
    Recompute,
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
    """FSDP1, which keeps the parameters of the model, of a compiled forward."""
    keeps = any(parallelism.use_orig_params for parallelism in scenario.layout.of(FSDP1))
    return keeps and scenario.layout.execution.compile is not Compile.NONE


@need
def compiled_anew_beside_gradients(scenario: Scenario) -> bool:
    """A later pass is another one while gradients are there: of another size, or at a step that starts from zeros."""
    training = scenario.training
    alternates = training.steps > 1 and any(layer.auxiliary is AuxiliaryLinear.EVEN_STEPS for layer in training.model.layers)
    return len(set(training.data.microbatches)) > 1 or (alternates and training.zero_grad is ZeroGrad.ZERO)


@need
def compiled_by_inductor(scenario: Scenario) -> bool:
    """A forward, and with it its backward, whose compiled code is kept on disk."""
    return scenario.layout.execution.compile is Compile.INDUCTOR


@need
def compiled_units_over_tensor_parallel(scenario: Scenario) -> bool:
    """FSDP1 units of single layers, which keep the model's parameters, of several layers with DTensors under one compiler."""
    layout = scenario.layout
    has_units = any(
        parallelism.use_orig_params and parallelism.wrapping is Wrapping.PER_LAYER for parallelism in layout.of(FSDP1)
    )
    return has_units and _compiles_whole(layout) and layout.has(TensorParallel) and len(scenario.training.model.layers) > 1


@need
def compiled_units_among_others_over_tensor_parallel(scenario: Scenario) -> bool:
    """Units of single layers, of any kind of FSDP, of several layers with DTensors under one compiler."""
    layout = scenario.layout
    wrapped = any(
        isinstance(each, FSDP1 | FSDP2 | Replicate) and each.wrapping is Wrapping.PER_LAYER for each in layout.parallelisms
    )
    return wrapped and _compiles_whole(layout) and layout.has(TensorParallel) and len(scenario.training.model.layers) > 1


@need
def shares_out_heads_of_any_width(scenario: Scenario) -> bool:
    """Heads whose width is a symbol are shared out over ranks, and the gradient of a weight asks for the size of all of them."""
    return scenario.layout.mesh.size(TP) > 1 and any(
        split is Split.WITHIN and not layer.frozen and (layer.fused or layer.heads > layer.kv_heads)
        for layer, split in _heads_of_any_width(scenario)
    )


@need
def transposes_heads_of_any_width(scenario: Scenario) -> bool:
    """DTensors get gradients that lie transposed, with the width of heads, which is a symbol, among their strides."""
    several_ranks = scenario.layout.mesh.size(TP) > 1
    return any(
        (several_ranks and split is Split.WITHIN) or (split is not Split.OUTSIDE and not layer.fused and not layer.rotary)
        for layer, split in _heads_of_any_width(scenario)
    )


def _heads_of_any_width(scenario: Scenario) -> Iterator[tuple[Attention, Split]]:
    """Attentions that are compiled for any width of heads, as another unit has had another one, and how a plan splits them.

    Numbers that a module holds are constants to Dynamo, but not those of a unit of FSDP; 1 always is.
    """
    layout, training = scenario.layout, scenario.training
    if not (_compiles_whole(layout) and any(map(_makes_units, layout.parallelisms))):
        return
    for plan in layout.of(TensorParallel):
        entries = zip(training.model.layers, plan.plan, strict=True)
        attentions = [(layer, entry.split) for layer, entry in entries if isinstance(layer, Attention)]
        for index, (layer, split) in enumerate(attentions):
            seen = attentions if len(set(training.data.microbatches)) > 1 else attentions[:index]
            if layer.head_width > 1 and any(other.head_width != layer.head_width for other, _ in seen):
                yield layer, split


def _makes_units(parallelism: Parallelism) -> bool:
    """Whether Dynamo meets each layer as a unit of FSDP."""
    if not isinstance(parallelism, FSDP1 | FSDP2) or parallelism.wrapping is not Wrapping.PER_LAYER:
        return False
    return isinstance(parallelism, FSDP2) or parallelism.use_orig_params


@need
def compiled_embedding_over_tensor_parallel(scenario: Scenario) -> bool:
    """Tokens are embedded by DTensors, under one compiler with the layers."""
    is_spread = any(plan.source is not Split.OUTSIDE for plan in scenario.layout.of(TensorParallel))
    return _compiles_whole(scenario.layout) and scenario.training.model.source is not None and is_spread


@need
def compiled_fused_attention_is_recomputed(scenario: Scenario) -> bool:
    """A compiled layer that attends by `scaled_dot_product_attention` is computed once more in the backward pass."""
    execution, layers = scenario.layout.execution, scenario.training.model.layers
    is_compiled = execution.compile is not Compile.NONE and execution.checkpointing is not Recompute.NONE
    return is_compiled and any(isinstance(layer, Attention) and layer.fused for layer in layers)


@need
def compiled_for_several_sizes(scenario: Scenario) -> bool:
    """A compiled forward of all layers meets microbatches of several sizes."""
    return len(set(scenario.training.data.microbatches)) > 1 and _compiles_whole(scenario.layout)


def _compiles_whole(layout: Layout) -> bool:
    return layout.execution.compile is not Compile.NONE and not layout.execution.per_layer


@need
def compiled_like_shards(scenario: Scenario) -> bool:
    """Compiled layers which tensor parallelism cuts along dims of several sizes, of which some rank has shards of one size."""
    layout, ranks = scenario.layout, scenario.layout.mesh.size(TP)
    sizes = {size for parallelism in layout.of(TensorParallel) for _, size in cuts(scenario.training.model, parallelism)}
    compiles = layout.execution.compile is not Compile.NONE
    return compiles and any(map(_has_like_chunks, combinations(sizes, 2), repeat(ranks)))


@need
def compiled_layers_between_ddp_and_tensor_parallel(scenario: Scenario) -> bool:
    """Layers compiled one by one, whose parameters DDP holds as local tensors between passes."""
    layout = scenario.layout
    swaps = layout.has(DDP) or any(each.implementation is Replicator.DDP for each in layout.of(Replicate))
    compiles = layout.execution.compile is not Compile.NONE and layout.execution.per_layer
    return swaps and compiles and layout.has(TensorParallel)


@need
def several_steps_of_layers_among_others(scenario: Scenario) -> bool:
    """Some layer is computed again after an update, with another layer or activation checkpointing around it."""
    among = len(scenario.training.model.layers) > 1 or scenario.layout.execution.checkpointing is not Recompute.NONE
    return scenario.training.steps > 1 and among


def _has_like_chunks(sizes: tuple[int, int], ranks: int) -> bool:
    """Whether some rank has as much of a dim of one size as of another."""
    first, second = (chunk_sizes(size, ranks) for size in sizes)
    return any(one == other for one, other in zip(first, second, strict=True))
