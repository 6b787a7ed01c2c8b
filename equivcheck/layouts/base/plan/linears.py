"""How linears under a plan compute: as what they need their input, how their output comes out, and the gradient of the input."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from equivcheck.layouts.base.plan.rules import computes_rows_apart, inputs_of
from equivcheck.scenario import ActivationSharding, LayerPlan, Model, PlannedParallelism, Split
from equivcheck.training.layers.facts import Part


class ActivationPlacement(Enum):
    """How an activation lies over the ranks, as `ActivationSharding` has it; PENDING is whole, but yet to be summed."""

    WHOLE = "whole"
    ROWS = "rows"
    FEATURES = "features"
    PENDING = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """How one linear computes, or an embedding, which has no input that could be moved."""

    wanted: ActivationPlacement
    """How it needs its input."""
    made: ActivationPlacement
    """How its output comes out."""
    input_gradient: ActivationPlacement
    """How the gradient of the input comes out."""


OF_SHARDING = {
    ActivationSharding.WHOLE: ActivationPlacement.WHOLE,
    ActivationSharding.ROWS: ActivationPlacement.ROWS,
    ActivationSharding.FEATURES: ActivationPlacement.FEATURES,
}
COLUMN = Linear(wanted=ActivationPlacement.WHOLE, made=ActivationPlacement.FEATURES, input_gradient=ActivationPlacement.PENDING)
ROW = Linear(wanted=ActivationPlacement.FEATURES, made=ActivationPlacement.PENDING, input_gradient=ActivationPlacement.FEATURES)
NARROW_COLUMN = Linear(wanted=ActivationPlacement.WHOLE, made=ActivationPlacement.WHOLE, input_gradient=ActivationPlacement.WHOLE)
NARROW_ROW = Linear(wanted=ActivationPlacement.FEATURES, made=ActivationPlacement.WHOLE, input_gradient=ActivationPlacement.WHOLE)
WHOLE = Linear(wanted=ActivationPlacement.WHOLE, made=ActivationPlacement.WHOLE, input_gradient=ActivationPlacement.WHOLE)
BY_ROWS = Linear(wanted=ActivationPlacement.ROWS, made=ActivationPlacement.ROWS, input_gradient=ActivationPlacement.ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What one linear is told."""

    split: Split
    """Along which dim its weight is cut: `COLUMN`, `ROW`, or neither."""
    input: ActivationSharding
    """How it finds its input."""
    output: ActivationSharding
    """How it leaves its output."""

    leaves_dtensor: bool = False
    """Whether DTensors are left as such, which know the size of the whole."""
    is_by_rows: bool = False
    """Whether it is whole on every rank, and each rank computes its own rows."""


def head_passage(model: Model, parallelism: PlannedParallelism) -> Passage:
    """What the linear of a head is told, whose output is whole, unless the loss takes what each rank has of it."""
    output = ActivationSharding.FEATURES if parallelism.loss_parallel else ActivationSharding.WHOLE
    lies = inputs_of(model, parallelism)[-1]
    return Passage(split=parallelism.head, input=lies, output=output, leaves_dtensor=parallelism.loss_parallel)


def passage(model: Model, part: Part, plan: LayerPlan, sharding: ActivationSharding) -> Passage:
    """What a part of a layer is told, for an input of the layer that lies as `sharding`.

    Between its parts a layer has units apart, its rows apart where it computes by rows, or everything on every rank.
    """
    split, between = plan.split, ActivationSharding.WHOLE
    if split is Split.WITHIN:
        split, between = Split.COLUMN if part.reads_input else Split.ROW, ActivationSharding.FEATURES
    by_rows = split is Split.REPLICATED and sharding is ActivationSharding.ROWS and computes_rows_apart(model)
    if by_rows:
        between = ActivationSharding.ROWS
    return Passage(
        split=split,
        input=sharding if part.reads_input else between,
        output=plan.output if part.gives_output else between,
        is_by_rows=by_rows,
    )
