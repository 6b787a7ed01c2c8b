"""Limits for DTensor propagation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.layouts.base.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.base.limits.dtensor_values import NO_SINGLE_SEQUENCE, ROWS_BEFORE_POSITIONS, UNFUSED_ATTENTION
from equivcheck.layouts.base.limits.execution import NO_COUNTS_IN_GRAPHS
from equivcheck.layouts.base.limits.limit import Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.optimizers import DTENSOR_OPTIMIZERS, WHOLE_PARAMETERS
from equivcheck.layouts.base.limits.propagated_gradients import PropagatedGradients
from equivcheck.layouts.base.limits.repairs import (
    each_layer,
    has_routing,
    with_model,
    with_summed_squares,
    with_tables,
    without_routing,
)
from equivcheck.layouts.base.partition import is_last_shard_empty
from equivcheck.scenario import SPMD, Distribution, Layout, Loss, Model, Norm, Training
from equivcheck.training.layers.parameters import parameters_of
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.token_facts import embedding_parameters


def _is_sharded(layout: Layout) -> bool:
    return parallelism_of(layout, SPMD).distribution is Distribution.FULLY_SHARD


def _cuts_short(training: Training, layout: Layout) -> bool:
    if parallelism_of(layout, SPMD).redistribute_gradients or not _is_sharded(layout):
        return False
    trained = (parameter for parameter in parameters_of(training.model) if parameter.trained and parameter.shape)
    return any(parameter.shape[0] < layout.num_data_ranks for parameter in trained)


def _leaves_pending(_training: Training, layout: Layout) -> bool:
    return not parallelism_of(layout, SPMD).redistribute_gradients


GRADIENTS_AS_PROPAGATED = PropagatedGradients(
    where="SPMD",
    ranks=lambda layout: layout.num_data_ranks,
    cuts_short=_cuts_short,
    leaves_pending=_leaves_pending,
    cuts_parameters=_is_sharded,
).limits()

ONLY_LINEAR_LOSS = UpstreamLimit(
    reason="DTensor: a loss that is not linear is not supported: no sharding strategy is registered for aten.mse_loss, and "
    "all-reduces of a cross-entropy are not predicted",
    applies=lambda training, _layout: not training.loss.is_linear,
    repair=lambda training, _layout: replace(training, loss=Loss.LINEAR_MEAN if training.loss.is_mean else Loss.LINEAR_SUM),
    torch="<2.11",
)


NO_BALANCE_BESIDE_MEANS = UpstreamLimit(
    reason="DTensor: a load-balancing loss added to a mean loss is not supported: the mean is an average over ranks, the "
    "load-balancing loss a sum, and DTensor refuses to add them ('Redistribution from one partial type')",
    applies=lambda training, layout: training.model.balances and training.loss.is_mean and layout.num_data_ranks > 1,
    repair=lambda training, _layout: (
        replace(training, loss=Loss.LINEAR_SUM) if training.loss.is_linear else with_summed_squares(training)
    ),
    torch=">=2.11,<2.12",
)


def _norms(model: Model) -> tuple[Norm | None, ...]:
    """Return the norm before each layer, then the norm before the head."""
    return (*(layer.norm for layer in model.layers), model.head.norm if model.head else None)


def _without(norm: Norm) -> Callable[[Training, Layout], Training]:
    """Build a repair that removes a norm.

    A norm on the model's inputs, whose features are not sharded, is replaced by RMSNorm.
    """

    def remove_norm(training: Training, _layout: Layout) -> Training:
        model = training.model
        first = Norm.RMS if model.source is None else None
        layers = (
            layer.with_fields(norm=None if index else first) if layer.norm is norm else layer
            for index, layer in enumerate(model.layers)
        )
        head = model.head and replace(model.head, norm=None if model.head.norm is norm else model.head.norm)
        return with_model(training, layers=tuple(layers), head=head)

    return remove_norm


NO_SHARDED_LAYER_NORM = UpstreamLimit(
    reason="DTensor: layer_norm with a sharded weight is not supported: it passes the rank's shard of the weight to the kernel, "
    "which refuses it",
    applies=lambda training, layout: _is_sharded(layout) and layout.num_data_ranks > 1 and Norm.LAYER in _norms(training.model),
    repair=_without(Norm.LAYER),
    torch="<2.13",
)

NO_RMS_NORM_OF_CUT_FEATURES = Limit(
    reason="DTensor: rms_norm of sharded features is not supported: it leaves out its epsilon, and takes the mean of the "
    "ranks' means even if ranks have unequal numbers of features",
    applies=lambda training, layout: (
        _is_sharded(layout) and Norm.RMS in _norms(training.model)[1 if training.model.source is None else 0 :]
    ),
    repair=_without(Norm.RMS),
    torch="<2.10",
)

NO_SELECTED_EXPERTS = Limit(
    reason="DTensor: selecting along a dim, such as one expert from stacked weights, is not supported: it overwrites the shape "
    "in its input's spec by the result's, so no other expert can be selected",
    applies=lambda training, _layout: has_routing(training.model),
    repair=lambda training, _layout: without_routing(training),
    torch="<2.10",
)


def _has_uneven_units(training: Training, layout: Layout) -> bool:
    ranks = layout.num_data_ranks
    uneven = any(layer_kind(layer).with_divisible_units(layer, ranks) != layer for layer in training.model.layers)
    return _is_sharded(layout) and uneven


EVEN_UNITS = UpstreamLimit(
    reason="DTensor: units, such as heads, that are not a multiple of the ranks are not supported: sharded features cannot be "
    "viewed as unequal numbers of units ('Cannot unflatten unevenly sharded tensor')",
    applies=_has_uneven_units,
    repair=lambda training, layout: each_layer(
        training, lambda _index, layer: layer_kind(layer).with_divisible_units(layer, layout.num_data_ranks)
    ),
)


def _has_tables_of_nothing(training: Training, layout: Layout) -> bool:
    tables = embedding_parameters(training.model)
    return _is_sharded(layout) and any(is_last_shard_empty(table.shape[0], layout.num_data_ranks) for table in tables)


TABLES_OF_NOTHING = Limit(
    reason="DTensor: an embedding without rows on some rank is not supported: that rank cannot look anything up "
    "('index_select(): self indexing axis dim should be positive'), and the others wait for it",
    applies=_has_tables_of_nothing,
    repair=lambda training, layout: with_tables(training, layout.num_data_ranks),
)

LIMITS: tuple[Limit, ...] = (
    NO_SELECTED_EXPERTS,
    UNFUSED_ATTENTION,
    EVEN_UNITS,
    ROWS_BEFORE_POSITIONS,
    NO_SINGLE_SEQUENCE,
    TABLES_OF_NOTHING,
    ONLY_LINEAR_LOSS,
    NO_BALANCE_BESIDE_MEANS,
    NO_SHARDED_LAYER_NORM,
    NO_RMS_NORM_OF_CUT_FEATURES,
    EVEN_ROWS,
    *DTENSOR_OPTIMIZERS,
    *WHOLE_PARAMETERS,
    *GRADIENTS_AS_PROPAGATED,
    NO_COUNTS_IN_GRAPHS,
)
