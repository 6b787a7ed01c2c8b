"""The linear layer, with norm, activation and residual around it."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.layers.base import Activation, AnyLayer, AuxiliaryLinear, Norm, ShapeOp
from equivcheck.scenario.layers.token_layers import MAX_DROPOUT
from equivcheck.scenario.noun import frozen_dataclass, require_between

MAX_WIDTH = 32

ARANGE_STEP = 0.125
"""Difference between neighbouring features in the tensor that `ShapeOp.ARANGE` adds; it starts at 0."""


@frozen_dataclass
class Layer(AnyLayer):
    """Linear layer: ``shape_op(residual(dropout(activation(linear(norm(x)) + auxiliary(norm(x))))))``."""

    tag: ClassVar[str] = "linear"
    width: int
    """Output features, 1 to 32."""
    bias: bool = True
    """Whether the linear has a bias."""
    activation: Activation = Activation.IDENTITY
    """Activation after the linear."""
    norm: Norm | None = None
    """Normalization before the linear, with learned weights; None disables it."""
    residual: bool = False
    """Whether the layer adds its input to its output; needs equal input and output features."""
    dropout: float = 0.0
    """Probability of zeroing an output element, 0 to 0.9. Masks are drawn with the data, so all ranks and the single-device run
    agree."""
    frozen: bool = False
    """Whether this layer's parameters have `requires_grad=False`. A shared weight follows the layer that owns it."""
    shares: int | None = None
    """Index of an earlier layer whose weight this layer shares; None for its own weight."""
    auxiliary: AuxiliaryLinear | None = None
    """When a second linear without bias is added to the first: never, or at steps 0, 2, 4 and so on.
    None if the layer has no second linear."""
    shape_op: ShapeOp | None = None
    """Last operation on the output; None disables it."""

    def __post_init__(self) -> None:
        require_between(self, "width", 1, MAX_WIDTH)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)

    @property
    def ends_in_linear(self) -> bool:
        """Whether the linear is the last operation."""
        plain = not (self.residual or self.dropout or self.shape_op)
        return plain and self.activation is Activation.IDENTITY

    def out_features(self, in_features: int) -> int:  # noqa: ARG002 - of the base class
        """Number of output features: `width`, whatever the input features are."""
        return self.width

    def refusal(self, in_features: int) -> tuple[str, str] | None:
        """Return the field `residual` and its allowed values if it is set but input and output features differ; else None."""
        if self.residual and self.width != in_features:
            return "residual", f"False, or equal input ({in_features}) and output ({self.width}) features"
        return None
