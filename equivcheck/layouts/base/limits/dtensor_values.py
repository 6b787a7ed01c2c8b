"""Limits for layouts whose activations are DTensors that are sharded by rows."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.limit import Limit, UpstreamLimit
from equivcheck.layouts.base.limits.repairs import each_layer, with_rows
from equivcheck.training.layers.registry import layer_kind

UNFUSED_ATTENTION = Limit(
    reason="DTensor: fused attention on CPU, and shapes that depend on values, such as the rows of an expert, are not "
    "supported: DTensor refuses causal fused attention, needs seconds for each shape of other fused attention, and has no rule "
    "for shapes that depend on values",
    applies=lambda training, _layout: any(
        layer_kind(layer).with_dtensor_strategies(layer) != layer for layer in training.model.layers
    ),
    repair=lambda training, _layout: each_layer(training, lambda _index, layer: layer_kind(layer).with_dtensor_strategies(layer)),
)

NO_SINGLE_SEQUENCE = UpstreamLimit(
    reason="DTensor: a microbatch of one sequence is not supported: DTensor cannot flatten a sharded dim of one row with the "
    "positions ('would remove or reshape sharded dimension 0')",
    applies=lambda training, _layout: training.model.length is not None and 1 in training.data.microbatches,
    repair=lambda training, _layout: with_rows(training, 2),
)

ROWS_BEFORE_POSITIONS = UpstreamLimit(
    reason="DTensor: sequences with rows along dim 1 are not supported: a linear flattens rows and positions into one dim "
    "('view size is not compatible')",
    applies=lambda training, _layout: training.model.length is not None and training.data.batch_dim != 0,
    repair=lambda training, _layout: replace(training, data=replace(training.data, batch_dim=0)),
)

LIMITS_OF_DTENSOR_VALUES: tuple[Limit, ...] = (UNFUSED_ATTENTION, ROWS_BEFORE_POSITIONS, NO_SINGLE_SEQUENCE)
