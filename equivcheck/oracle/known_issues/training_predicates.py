"""What issues on file ask of trainings, however spread."""

from __future__ import annotations

from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.limits.optimizers import is_adafactor_of_cuts
from equivcheck.layouts.base.limits.repairs import has_shares
from equivcheck.layouts.composition.full_tensors import asks_full_tensors
from equivcheck.scenario import (
    Adafactor,
    Adam,
    ClipNorm,
    ClipValue,
    Implementation,
    Loss,
    Muon,
    Norm,
    NormType,
    Precision,
    Recompute,
    Scenario,
    ShapeOp,
)
from equivcheck.worlds.trace.differences import Divergence


@need
def shared_weights(scenario: Scenario) -> bool:
    """Some layers share a weight."""
    return has_shares(scenario.training.model)


@need
def several_microbatches_or_steps(scenario: Scenario) -> bool:
    """The model computes more than once."""
    training = scenario.training
    return training.steps > 1 or len(training.data.microbatches) > 1


@need
def rms_norm_after_a_layer(scenario: Scenario) -> bool:
    """An RMSNorm gets what a linear computed, or what tokens were embedded as."""
    model = scenario.training.model
    of_layers = any(layer.norm is Norm.RMS for layer in model.layers[0 if model.source else 1 :])
    return of_layers or (model.head is not None and model.head.norm is Norm.RMS)


@need
def mean_squared_error(scenario: Scenario) -> bool:
    """The loss is the mean squared error."""
    return scenario.training.loss is Loss.MSE_MEAN


@need
def mean_of_outputs(scenario: Scenario) -> bool:
    """The loss is the mean of outputs less targets."""
    return scenario.training.loss is Loss.LINEAR_MEAN


@need
def full_tensors_are_read(scenario: Scenario) -> bool:
    """What `full_tensor()` gives of parameters and gradients is read at the last step."""
    return asks_full_tensors(scenario)


@need
def rows_along_second_dim(scenario: Scenario) -> bool:
    """Rows of inputs lie along dim 1, so that the first layer gets a transposed tensor."""
    return scenario.training.data.batch_dim == 1


@need
def repeats(scenario: Scenario) -> bool:
    """A layer repeats its output."""
    return any(layer.shape_op is ShapeOp.REPEAT for layer in scenario.training.model.layers)


@need
def inf_norm(scenario: Scenario) -> bool:
    """Gradients are clipped by their largest element."""
    clipping = scenario.training.clipping
    return isinstance(clipping, ClipNorm) and clipping.norm_type is NormType.INF


@need
def adafactor(scenario: Scenario) -> bool:
    """The optimizer divides by the number of a parameter's elements."""
    return isinstance(scenario.training.optimizer, Adafactor)


@need
def muon(scenario: Scenario) -> bool:
    """The optimizer divides the rows of a matrix by its columns."""
    return isinstance(scenario.training.optimizer, Muon)


@need
def fused_adam(scenario: Scenario) -> bool:
    """The optimizer is Adam or AdamW in its fused implementation."""
    optimizer = scenario.training.optimizer
    return isinstance(optimizer, Adam) and optimizer.implementation is Implementation.FUSED


@need
def clipping_by_value(scenario: Scenario) -> bool:
    """Gradients are clipped element by element."""
    return isinstance(scenario.training.clipping, ClipValue)


@need
def clipping_by_norm(scenario: Scenario) -> bool:
    """Gradients are clipped by a norm."""
    return isinstance(scenario.training.clipping, ClipNorm)


@need
def double_precision(scenario: Scenario) -> bool:
    """Parameters are float64."""
    return scenario.training.precision is Precision.FLOAT64


@need
def several_data_ranks(scenario: Scenario) -> bool:
    """The batch is spread over more than one rank."""
    return scenario.layout.num_data_ranks > 1


@need
def backward_is_compiled(scenario: Scenario) -> bool:
    """The backward of the loss is compiled, by compiled autograd."""
    return scenario.layout.execution.compiled_autograd


@need
def sequences_computed_twice(scenario: Scenario) -> bool:
    """Layers that take sequences are computed once more in the backward pass."""
    return scenario.training.model.length is not None and scenario.layout.execution.checkpointing is not Recompute.NONE


@need
def backward_is_traced(scenario: Scenario) -> bool:
    """The backward of the loss is traced: with a whole step, or by compiled autograd."""
    execution = scenario.layout.execution
    return execution.whole_step or execution.compiled_autograd


@need
def adafactor_of_shards(scenario: Scenario) -> bool:
    """Adafactor updates DTensors of which several ranks hold different parts."""
    return is_adafactor_of_cuts(scenario.training, scenario.layout)


@show
def times_data_ranks(scenario: Scenario, divergence: Divergence) -> bool:
    """The value is the expected one times the number of data ranks, to 5 % of what it is off by."""
    expected, actual = float(divergence.expected), float(divergence.actual)
    return abs(actual - scenario.layout.num_data_ranks * expected) <= 0.05 * abs(actual - expected)


@show
def of_a_matrix(_scenario: Scenario, divergence: Divergence) -> bool:
    """The tensor has two dims, so that it can be laid out in more than one way."""
    return len(divergence.index) == 2


@show
def of_a_shared_weight(scenario: Scenario, divergence: Divergence) -> bool:
    """The tensor is a weight that several layers have, by the name of any of them."""
    pairs = [(index, layer.shares) for index, layer in enumerate(scenario.training.model.layers) if layer.shares is not None]
    return divergence.tensor in {f"layers.{index}.linear.weight" for pair in pairs for index in pair}


@show
def norm_of_an_earlier_step(_scenario: Scenario, divergence: Divergence) -> bool:
    """The norm, right at the first step, is too large at a later one."""
    return divergence.step > 0 and divergence.tensor == "norm" and float(divergence.actual) > float(divergence.expected)
