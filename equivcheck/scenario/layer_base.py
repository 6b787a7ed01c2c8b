"""What every kind of layer says of itself."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import ClassVar, Self

from equivcheck.scenario.noun import noun
from equivcheck.system.choice import Choice


class Activation(Choice):
    """An elementwise function."""

    IDENTITY = "identity"
    RELU = "relu"
    GELU = "gelu"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    SILU = "silu"


class Norm(Choice):
    """The normalisation of a layer's input over its features."""

    LAYER = "layer"
    RMS = "rms"


class AuxiliaryLinear(Choice):
    """At which steps the auxiliary linear of a layer takes part."""

    NEVER = "never"
    EVEN_STEPS = "even_steps"


class ShapeOp(Choice):
    """What a layer does to its output last: an identity through other shapes, or the sum with what a factory function makes."""

    FLATTEN = "flatten"
    SQUEEZE = "squeeze"
    UNSQUEEZE = "unsqueeze"
    VIEW = "view"
    REPEAT = "repeat"
    ARANGE = "arange"
    ONES = "ones"
    ZEROS = "zeros"


@noun
class AnyLayer:
    """Base of every kind of layer: what all may ask of one. A kind has fields for what it may have, the rest is as it is here."""

    tag: ClassVar[str]
    """Its name in JSON and in reports."""
    needs_length: ClassVar[bool] = False
    """Whether it mixes or counts positions, so that rows must be sequences."""

    @property
    def frozen(self) -> bool:
        """Whether its parameters require no gradient."""
        return False

    @property
    def bias(self) -> bool:
        """Whether any of its linears has a bias."""
        return False

    @property
    def norm(self) -> Norm | None:
        """What normalises its input, with learnt weights; None for nothing."""
        return None

    @property
    def residual(self) -> bool:
        """Whether its input is added to its output."""
        return False

    @property
    def dropout(self) -> float:
        """Probability of zeroing an output, by a mask that is part of the data."""
        return 0.0

    @property
    def shares(self) -> int | None:
        """Index of an earlier layer whose weight it uses; None for its own."""
        return None

    @property
    def auxiliary(self) -> AuxiliaryLinear | None:
        """When a part of it runs that does not run at every step; None where it has none."""
        return None

    @property
    def shape_op(self) -> ShapeOp | None:
        """What is done to its output last; None for nothing."""
        return None

    @property
    def balance(self) -> float:
        """Coefficient of a loss of its own for how unequally its units are chosen; 0 for none."""
        return 0.0

    @property
    def ends_in_linear(self) -> bool:
        """Whether its output is what its last linear gives, with nothing done to it."""
        return not self.residual and not self.dropout and self.shape_op is None

    def outputs(self, inputs: int) -> int:
        """How many features leave it where so many enter."""
        return inputs

    def refusal(self, inputs: int) -> tuple[str, str] | None:  # noqa: ARG002 - for those that refuse some
        """A field that does not go with so many inputs, and what is allowed; None where all do."""
        return None

    def having(self, **changes: object) -> Self:
        """The same with other values of those fields that its kind has."""
        names = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in changes.items() if name in names})

    def rounded(self, multiple: int) -> Self:  # noqa: ARG002 - for those that have sizes within
        """The same with sizes within, between input and output, that are a multiple."""
        return self

    def without_routing(self) -> AnyLayer:
        """The nearest layer no part of which is chosen by what it computes; the same where none is."""
        return self

    @property
    def has_matrices_only(self) -> bool:
        """Whether every parameter of it has two dims."""
        return not self.bias and self.norm is None
