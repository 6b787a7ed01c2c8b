"""Known-issue predicates for SPMD scenarios."""

from __future__ import annotations

from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.scenario import FSDP2, SPMD, AuxiliaryLinear, Distribution, Loss, Scenario, ShapeOp, ZeroGrad
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.layers.registry import layer_kind
from equivcheck.worlds.trace.differences import Divergence

CUTS_OUTPUTS_OF_FEW_ROWS = "<2.10"
"""Versions in which propagation may shard outputs by features if there are few rows, even if rows are dim 0."""


@need
def sharded_by_rows(scenario: Scenario) -> bool:
    """Whether SPMD has parameters sharded along dim 0."""
    return any(spmd.distribution is Distribution.FULLY_SHARD for spmd in scenario.layout.of(SPMD))


@need
def gradients_as_propagated(scenario: Scenario) -> bool:
    """Whether gradients under SPMD keep the placements from DTensor's sharding propagation."""
    return any(not spmd.redistribute_gradients for spmd in scenario.layout.of(SPMD))


@need
def unlike_gradients_added_up(scenario: Scenario) -> bool:
    """Whether gradients with different placements may be accumulated.

    This happens if microbatches have different numbers of rows. It also happens if gradients are set to zero instead of None, and
    an auxiliary linear runs at even steps only.
    """
    training = scenario.training
    kept = training.zero_grad is ZeroGrad.ZERO and training.steps > 1
    at_some = any(layer.auxiliary is AuxiliaryLinear.EVEN_STEPS for layer in training.model.layers)
    return len(set(training.data.microbatches)) > 1 or (kept and at_some)


@need
def one_row_after_several(scenario: Scenario) -> bool:
    """Whether a rank has several rows in the first microbatch, and one row in a later microbatch."""
    (first, *later), ranks = scenario.training.data.microbatches, scenario.layout.num_data_ranks
    return first > ranks and ranks in later


@need
def sharded_by_batch(scenario: Scenario) -> bool:
    """Whether parameters are replicated DTensors during forward, so that activations stay sharded by rows."""
    is_replicated = any(spmd.distribution is Distribution.REPLICATE for spmd in scenario.layout.of(SPMD))
    return is_replicated or any(fsdp.mesh_dims is not None for fsdp in scenario.layout.of(FSDP2))


@need
def flattened_between_transpositions(scenario: Scenario) -> bool:
    """Whether inputs have rows along dim 1, the model flattens dims, and the loss gives different rows different gradients.

    Models flatten dims in a layer's output, or before a linear on sequences.
    """
    training = scenario.training
    flattens = any(layer.shape_op is ShapeOp.FLATTEN for layer in training.model.linears) or training.model.length is not None
    squares = isinstance(training.loss, Loss) and not training.loss.is_linear
    return flattens and squares and training.data.batch_dim == 1


@need
def rows_and_features_flattened(scenario: Scenario) -> bool:
    """Whether a layer flattens its output, which has several rows and several features."""
    layers, microbatches = scenario.training.model.linears, scenario.training.data.microbatches
    return max(microbatches) > 1 and any(layer.shape_op is ShapeOp.FLATTEN and layer.width > 1 for layer in layers)


@need
def several_heads(scenario: Scenario) -> bool:
    """Whether attention has several heads. torch flattens heads and rows into one dim for matrix products."""
    attention_shapes = (layer_kind(layer).attention_shape(layer) for layer in scenario.training.model.layers)
    return any(attention_shape is not None and attention_shape.num_heads > 1 for attention_shape in attention_shapes)


@need
def features_viewed_unevenly(scenario: Scenario) -> bool:
    """Whether a layer splits its features into two dims.

    The first dim must also not be divisible by the number of data-parallel ranks.
    """
    return any(
        layer.shape_op is ShapeOp.VIEW and (2 if layer.width % 2 == 0 else layer.width) % scenario.layout.num_data_ranks != 0
        for layer in scenario.training.model.linears
    )


@need
def one_row_or_feature_on_one_rank(scenario: Scenario) -> bool:
    """Whether the mesh has one rank, and either a layer flattens a single row, or a linear with a bias has one output feature.

    The output feature matters only if parameters are sharded along dim 0.
    """
    layers, microbatches = scenario.training.model.linears, scenario.training.data.microbatches
    rows = 1 in microbatches and any(layer.shape_op is ShapeOp.FLATTEN for layer in layers)
    features = sharded_by_rows(scenario) and any(layer.width == 1 and layer.bias for layer in layers)
    return scenario.layout.mesh.num_ranks == 1 and (rows or features)


@need
def outputs_cut_unevenly(scenario: Scenario) -> bool:
    """Whether DTensor's sharding propagation may split output features unevenly, because parameters are sharded along dim 0."""
    training = scenario.training
    uneven = training.model.out_features % scenario.layout.num_data_ranks != 0
    may_be_cut = training.data.batch_dim == 1 or is_torch_in(CUTS_OUTPUTS_OF_FEW_ROWS)
    return uneven and may_be_cut and sharded_by_rows(scenario)


@need
def traced_steps(scenario: Scenario) -> bool:
    """Whether each step is traced into one graph."""
    return scenario.layout.execution.whole_step


@show
def mean_of_uneven_means(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergent loss may be the mean of the ranks' means, each over another number of features."""
    outputs, ranks = scenario.training.model.out_features, scenario.layout.num_data_ranks
    sizes = chunk_sizes(outputs, ranks)
    if not all(sizes):
        return False
    least, most = (outputs / (ranks * size) for size in (sizes[0], sizes[-1]))
    expected = float(divergence.expected)
    return least * expected <= float(divergence.actual) <= most * expected
