"""Predicates on the training, for the field `needs` of known issues."""

from __future__ import annotations

from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.limits.optimizers import is_adafactor_on_shards
from equivcheck.layouts.base.limits.repairs import has_shares
from equivcheck.layouts.composition.full_tensors import asks_full_tensors
from equivcheck.scenario import (
    Adafactor,
    Adam,
    Checkpointing,
    ClipNorm,
    ClipValue,
    Implementation,
    Loss,
    Muon,
    Norm,
    NormType,
    Precision,
    Scenario,
    ShapeOp,
)
from equivcheck.worlds.trace.differences import Divergence


@need
def shared_weights(scenario: Scenario) -> bool:
    """Whether some layers share a weight."""
    return has_shares(scenario.training.model)


@need
def several_microbatches_or_steps(scenario: Scenario) -> bool:
    """Whether the model runs forward more than once in the training."""
    training = scenario.training
    return training.steps > 1 or len(training.data.microbatches) > 1


@need
def rms_norm_after_a_layer(scenario: Scenario) -> bool:
    """Whether an RMSNorm follows a linear or an embedding."""
    model = scenario.training.model
    of_layers = any(layer.norm is Norm.RMS for layer in model.layers[0 if model.source else 1 :])
    return of_layers or (model.head is not None and model.head.norm is Norm.RMS)


@need
def mean_squared_error(scenario: Scenario) -> bool:
    """Whether the loss is the mean squared error."""
    return scenario.training.loss is Loss.MSE_MEAN


@need
def linear_loss(scenario: Scenario) -> bool:
    """Whether the loss is linear in the outputs, so that its gradient is the same for all rows."""
    return scenario.training.loss.is_linear


@need
def has_vectors(scenario: Scenario) -> bool:
    """Whether the model has a parameter with one dim, such as a bias."""
    return not scenario.training.model.has_matrices_only


@need
def loss_of_full_batch(scenario: Scenario) -> bool:
    """Whether the loss is computed from DTensor outputs that are sharded by rows."""
    return scenario.layout.propagates_placements


@need
def mean_of_outputs(scenario: Scenario) -> bool:
    """Whether the loss is the mean over all differences (output minus target)."""
    return scenario.training.loss is Loss.LINEAR_MEAN


@need
def full_tensors_are_read(scenario: Scenario) -> bool:
    """Whether the training calls `full_tensor()` on parameters and gradients in the last step."""
    return asks_full_tensors(scenario)


@need
def rows_along_second_dim(scenario: Scenario) -> bool:
    """Whether rows are dim 1 in the inputs, so the first layer gets a transposed tensor."""
    return scenario.training.data.batch_dim == 1


@need
def repeats(scenario: Scenario) -> bool:
    """Whether a layer repeats its output along a dim."""
    return any(layer.shape_op is ShapeOp.REPEAT for layer in scenario.training.model.layers)


@need
def inf_norm(scenario: Scenario) -> bool:
    """Whether gradients are clipped by the infinity norm."""
    clipping = scenario.training.clipping
    return isinstance(clipping, ClipNorm) and clipping.norm_type is NormType.INF


@need
def adafactor(scenario: Scenario) -> bool:
    """Whether the optimizer is Adafactor, which divides by the number of elements in a parameter."""
    return isinstance(scenario.training.optimizer, Adafactor)


@need
def muon(scenario: Scenario) -> bool:
    """Whether the optimizer is Muon, which divides a matrix's number of rows by its number of columns."""
    return isinstance(scenario.training.optimizer, Muon)


@need
def fused_adam(scenario: Scenario) -> bool:
    """Whether the optimizer is fused Adam or AdamW."""
    optimizer = scenario.training.optimizer
    return isinstance(optimizer, Adam) and optimizer.implementation is Implementation.FUSED


@need
def clipping_by_value(scenario: Scenario) -> bool:
    """Whether gradients are clipped by value."""
    return isinstance(scenario.training.clipping, ClipValue)


@need
def clipping_by_norm(scenario: Scenario) -> bool:
    """Whether gradients are clipped by a norm."""
    return isinstance(scenario.training.clipping, ClipNorm)


@need
def double_precision(scenario: Scenario) -> bool:
    """Whether parameters are float64."""
    return scenario.training.precision is Precision.FLOAT64


@need
def several_data_ranks(scenario: Scenario) -> bool:
    """Whether the batch is divided over several ranks, each with its own rows."""
    return scenario.layout.num_data_ranks > 1


@need
def backward_is_compiled(scenario: Scenario) -> bool:
    """Whether compiled autograd runs the backward."""
    return scenario.layout.execution.compiled_autograd


@need
def sequences_computed_twice(scenario: Scenario) -> bool:
    """Whether layers on sequences are computed again in backward, by activation checkpointing."""
    return scenario.training.model.length is not None and scenario.layout.execution.checkpointing is not Checkpointing.NONE


@need
def backward_is_traced(scenario: Scenario) -> bool:
    """Whether the backward is traced by the compiler, as part of a compiled step or by compiled autograd."""
    execution = scenario.layout.execution
    return execution.whole_step or execution.compiled_autograd


@need
def adafactor_of_shards(scenario: Scenario) -> bool:
    """Whether Adafactor updates parameters that are DTensors sharded over several ranks."""
    return is_adafactor_on_shards(scenario.training, scenario.layout)


@show
def times_data_ranks(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the wrong value is about the expected value times the number of data-parallel ranks.

    The distance to this product must not exceed 5 % of the difference between the wrong and the expected value.
    """
    expected, actual = float(divergence.expected), float(divergence.actual)
    return abs(actual - scenario.layout.num_data_ranks * expected) <= 0.05 * abs(actual - expected)


@show
def of_several_dims(_scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the diverged tensor has several dims, so that its gradient may have other strides than the parameter."""
    return len(divergence.index) > 1


@show
def of_a_shared_weight(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the diverged tensor is a weight that several layers share."""
    pairs = [(index, layer.shares) for index, layer in enumerate(scenario.training.model.layers) if layer.shares is not None]
    return divergence.tensor in {f"layers.{index}.linear.weight" for pair in pairs for index in pair}


@show
def norm_of_an_earlier_step(_scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the diverged value is a gradient norm that may come from an earlier step: it is larger than expected."""
    return divergence.step > 0 and divergence.tensor == "norm" and float(divergence.actual) > float(divergence.expected)
