"""How linears under a plan compute: as what they need their input, how their output comes out, and the gradient of the input."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from equivcheck.scenario import ActivationSharding


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
