"""What DTensor propagation cannot run."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layers.parameters import parameters_of
from equivcheck.layouts.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.limits.execution import NO_COUNTS_IN_GRAPHS
from equivcheck.layouts.limits.limit import Limit, parallelism_of
from equivcheck.layouts.limits.optimizers import DTENSOR_OPTIMIZERS, WHOLE_PARAMETERS
from equivcheck.layouts.limits.propagated_gradients import limits_of_propagated_gradients
from equivcheck.layouts.limits.repairs import each_layer
from equivcheck.scenario import SPMD, Distribution, Layout, Loss, Norm, Training


def _is_sharded(layout: Layout) -> bool:
    return parallelism_of(layout, SPMD).distribution is Distribution.FULLY_SHARD


def _cuts_short(training: Training, layout: Layout) -> bool:
    if parallelism_of(layout, SPMD).redistribute_gradients or not _is_sharded(layout):
        return False
    trained = (parameter for parameter in parameters_of(training.model) if parameter.trained and parameter.shape)
    return any(parameter.shape[0] < layout.num_data_ranks for parameter in trained)


def _leaves_pending(_training: Training, layout: Layout) -> bool:
    return not parallelism_of(layout, SPMD).redistribute_gradients


GRADIENTS_AS_PROPAGATED = limits_of_propagated_gradients(
    "SPMD",
    ranks=lambda layout: layout.num_data_ranks,
    cuts_short=_cuts_short,
    leaves_pending=_leaves_pending,
    cuts_parameters=_is_sharded,
)

NO_SQUARED_LOSS = Limit(
    reason="DTensor: no sharding strategy is registered for aten.mse_loss",
    applies=lambda training, _layout: not training.loss.is_linear,
    repair=lambda training, _layout: replace(training, loss=Loss.LINEAR_MEAN if training.loss.is_mean else Loss.LINEAR_SUM),
    upstream=True,
    torch="<2.11",
)

NO_SHARDED_LAYER_NORM = Limit(
    reason="DTensor: layer_norm computes with the rank's shard of its weight, which is refused",
    applies=lambda training, layout: (
        _is_sharded(layout) and layout.num_data_ranks > 1 and any(layer.norm is Norm.LAYER for layer in training.model.layers)
    ),
    repair=lambda training, _layout: each_layer(
        training, lambda index, layer: replace(layer, norm=_instead(index)) if layer.norm is Norm.LAYER else layer
    ),
    upstream=True,
    torch="<2.13",
)

NO_RMS_NORM_OF_CUT_FEATURES = Limit(
    reason="DTensor: rms_norm of features that propagation has cut leaves out its epsilon, and takes the mean of the ranks' "
    "means, however many features each has",
    applies=lambda training, layout: _is_sharded(layout) and any(layer.norm is Norm.RMS for layer in training.model.layers[1:]),
    repair=lambda training, _layout: each_layer(
        training, lambda index, layer: replace(layer, norm=_instead(index)) if layer.norm is Norm.RMS else layer
    ),
    torch="<2.10",
)


def _instead(index: int) -> Norm | None:
    """The norm that a layer can have: of the model's inputs, whose features are whole, or none."""
    return Norm.RMS if index == 0 else None


LIMITS: tuple[Limit, ...] = (
    NO_SQUARED_LOSS,
    NO_SHARDED_LAYER_NORM,
    NO_RMS_NORM_OF_CUT_FEATURES,
    EVEN_ROWS,
    *DTENSOR_OPTIMIZERS,
    *WHOLE_PARAMETERS,
    *GRADIENTS_AS_PROPAGATED,
    NO_COUNTS_IN_GRAPHS,
)
