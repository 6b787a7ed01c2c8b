"""Base class and enums for all kinds of layers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import ClassVar, Self

from equivcheck.scenario.noun import frozen_dataclass
from equivcheck.system.choice import PrintableEnum


class Activation(PrintableEnum):
    """Elementwise activation function."""

    IDENTITY = "identity"
    RELU = "relu"
    GELU = "gelu"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    SILU = "silu"


class Norm(PrintableEnum):
    """Normalization over features."""

    LAYER = "layer"
    RMS = "rms"


class AuxiliaryLinear(PrintableEnum):
    """Steps at which a layer runs its auxiliary linear, a second linear whose output is added to the first one's."""

    NEVER = "never"
    EVEN_STEPS = "even_steps"


class ShapeOp(PrintableEnum):
    """Last operation on a layer's output: reshapes that keep all values, or the addition of a new tensor (`torch.arange`)."""

    FLATTEN = "flatten"
    SQUEEZE = "squeeze"
    UNSQUEEZE = "unsqueeze"
    VIEW = "view"
    REPEAT = "repeat"
    ARANGE = "arange"
    ONES = "ones"
    ZEROS = "zeros"


@frozen_dataclass
class AnyLayer:
    """Base class for all kinds of layers.

    A subclass declares its options as fields. For all other options, the properties here return defaults.
    """

    tag: ClassVar[str]
    """Name in JSON and in reports."""
    needs_length: ClassVar[bool] = False
    """Whether the layer mixes or counts positions, so that rows must be sequences."""

    @property
    def frozen(self) -> bool:
        """Whether the layer's parameters have `requires_grad=False`."""
        return False

    @property
    def bias(self) -> bool:
        """Whether any linear in the layer has a bias."""
        return False

    @property
    def norm(self) -> Norm | None:
        """Normalization before the layer, with learned weights; None disables it."""
        return None

    @property
    def residual(self) -> bool:
        """Whether the layer adds its input to its output."""
        return False

    @property
    def dropout(self) -> float:
        """Probability of zeroing an output element. Dropout masks are drawn from the training's seed, like the data."""
        return 0.0

    @property
    def shares(self) -> int | None:
        """Index of an earlier layer whose weight this layer shares; None for its own weight."""
        return None

    @property
    def auxiliary(self) -> AuxiliaryLinear | None:
        """Steps at which the layer's auxiliary linear runs; None if the layer has no auxiliary linear."""
        return None

    @property
    def shape_op(self) -> ShapeOp | None:
        """Last operation on the output; None disables it."""
        return None

    @property
    def balance(self) -> float:
        """Coefficient for the layer's load-balancing loss; 0 disables it."""
        return 0.0

    @property
    def balance_per_sequence(self) -> bool:
        """Whether the load-balancing loss is computed for each sequence by itself, and not over a microbatch."""
        return False

    @property
    def frozen_base(self) -> bool:
        """Whether the layer's base weight is frozen, and an adapter is trained."""
        return False

    @property
    def router_bias_rate(self) -> float:
        """Step size of the bias with which the layer's router chooses experts; 0 if there is no such bias."""
        return 0.0

    @property
    def ends_in_linear(self) -> bool:
        """Whether the output comes directly from the last linear."""
        return not self.residual and not self.dropout and self.shape_op is None

    def out_features(self, in_features: int) -> int:
        """Number of output features for `in_features` input features."""
        return in_features

    def refusal(self, in_features: int) -> tuple[str, str] | None:  # noqa: ARG002 - used by overriding methods
        """Return the name of a field whose value does not fit `in_features`, and values that do; None if all fields fit."""
        return None

    def with_fields(self, **changes: object) -> Self:
        """Return a copy with changed fields. Fields that this kind of layer does not have are ignored."""
        names = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in changes.items() if name in names})

    def rounded_up(self, multiple: int) -> Self:  # noqa: ARG002 - used by overriding methods
        """Return a copy with all inner sizes, such as hidden features, rounded up to multiples of `multiple`."""
        return self

    def without_routing(self) -> AnyLayer:
        """Return the closest layer without data-dependent routing, or the layer itself if it has no such routing."""
        return self

    @property
    def has_matrices_only(self) -> bool:
        """Whether all parameters of the layer have exactly two dims."""
        return not self.bias and self.norm is None
