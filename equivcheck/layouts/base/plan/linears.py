"""Placements around linears in a plan: required input, output, and gradient for the input."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from equivcheck.layouts.base.plan.rules import computes_own_rows, inputs_of
from equivcheck.scenario import ActivationSharding, LayerPlan, Model, PlannedParallelism, Split
from equivcheck.training.layers.facts import LayerLinear


class ActivationPlacement(Enum):
    """Placement of an activation over the tensor-parallel ranks. PARTIAL: the sum over ranks is the full tensor."""

    REPLICATED = "replicated"
    ROWS = "rows"
    FEATURES = "features"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class LinearPlacements:
    """Placements of input, output and input gradient for one linear layer or embedding.

    An embedding's input, its tokens, is never redistributed.
    """

    wanted: ActivationPlacement
    """Required placement for the linear's input."""
    made: ActivationPlacement
    """Placement of the linear's output before redistribution."""
    input_gradient: ActivationPlacement
    """Placement of the input's gradient, as computed by backward."""


OF_SHARDING = {
    ActivationSharding.REPLICATED: ActivationPlacement.REPLICATED,
    ActivationSharding.ROWS: ActivationPlacement.ROWS,
    ActivationSharding.FEATURES: ActivationPlacement.FEATURES,
}
# Required input, output, and gradient for the input.
COLUMN = LinearPlacements(ActivationPlacement.REPLICATED, ActivationPlacement.FEATURES, ActivationPlacement.PARTIAL)
ROW = LinearPlacements(ActivationPlacement.FEATURES, ActivationPlacement.PARTIAL, ActivationPlacement.FEATURES)
NARROW_COLUMN = LinearPlacements(ActivationPlacement.REPLICATED, ActivationPlacement.REPLICATED, ActivationPlacement.REPLICATED)
NARROW_ROW = LinearPlacements(ActivationPlacement.FEATURES, ActivationPlacement.REPLICATED, ActivationPlacement.REPLICATED)
WHOLE = LinearPlacements(ActivationPlacement.REPLICATED, ActivationPlacement.REPLICATED, ActivationPlacement.REPLICATED)
BY_ROWS = LinearPlacements(ActivationPlacement.ROWS, ActivationPlacement.ROWS, ActivationPlacement.ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPlan:
    """Tensor-parallel plan for one linear layer."""

    split: Split
    """How the weight is sharded: `COLUMN`, `ROW`, or not at all."""
    input: ActivationSharding
    """Placement of the linear's input before redistribution."""
    output: ActivationSharding
    """Placement of the linear's output after redistribution."""

    leaves_dtensor: bool = False
    """Whether the output stays a DTensor, so that its full size is known."""
    is_by_rows: bool = False
    """Whether each rank computes its own rows with a replicated weight."""


def head_plan(model: Model, parallelism: PlannedParallelism) -> LinearPlan:
    """Return the plan for the head's linear. Its output is replicated, or sharded by features if `loss_parallel` is on."""
    output = ActivationSharding.FEATURES if parallelism.loss_parallel else ActivationSharding.REPLICATED
    lies = inputs_of(model, parallelism)[-1]
    return LinearPlan(split=parallelism.head, input=lies, output=output, leaves_dtensor=parallelism.loss_parallel)


def linear_plan(model: Model, part: LayerLinear, plan: LayerPlan, sharding: ActivationSharding) -> LinearPlan:
    """Return the plan for one linear (`part`) in a layer with the entry `plan`. `sharding` is the placement of the layer's input.

    If the layer is sharded by heads or hidden features, activations between its linears are sharded by features. If each rank
    computes the layer for its own rows, they are sharded by rows. Otherwise, they are replicated. One linear of an
    adapter stays replicated although the layer is split.
    """
    split, between = plan.split, ActivationSharding.REPLICATED
    if split is Split.HEADS_OR_HIDDEN:
        split, between = Split.COLWISE if part.reads_input else Split.ROWWISE, ActivationSharding.FEATURES
    by_rows = split is Split.REPLICATED and sharding is ActivationSharding.ROWS and computes_own_rows(model)
    if by_rows:
        between = ActivationSharding.ROWS
    if split is part.replicated_under:
        split = Split.REPLICATED
    return LinearPlan(
        split=split,
        input=sharding if part.reads_input else between,
        output=plan.output if part.gives_output else between,
        is_by_rows=by_rows,
    )
