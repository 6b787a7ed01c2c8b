"""Forward and backward passes that a rank runs in each step, through the whole model or through pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario import ParameterOwner
from equivcheck.training.layers.parameters import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive layers that a rank calls as one module: a pipeline stage, or the whole model."""

    layers: range
    """Layer indices."""
    is_first: bool = True
    """Whether the module has the embedding."""
    is_last: bool = True
    """Whether the module has the head, and its outputs go to the loss."""
    differentiates_input: bool = False
    """Whether every backward computes a gradient for the module's input."""
    infers_shapes: bool = False
    """Whether an additional forward infers the shapes that stages send, before the first chunk with a new number of rows."""
    infers_gradients: bool = False
    """Whether this forward is followed by the loss, and by a backward that only computes a gradient for the module's input."""

    def holds(self, parameter: Parameter) -> bool:
        """Whether the module has a parameter, because it has the layer, the embedding, the head or the output scale."""
        owners = {ParameterOwner.SOURCE: self.is_first, ParameterOwner.HEAD: self.is_last, ParameterOwner.MODEL: self.is_last}
        return parameter.layer in self.layers or owners.get(parameter.owner, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Passes through the same module in the same step, on equally many rows."""

    step: int
    """Step, from 0."""
    span: Span
    """The module's layers."""
    rows: int
    """Number of rows, or sequences, in one pass."""
    times: int
    """How many passes."""
    loss_rows: int
    """Rows, or sequences, that the passes together have in the loss. Rows that only pad a chunk are left out."""
    infers: bool = False
    """Whether the passes only infer the shapes that a stage sends. They compute no parameter gradients."""

    @property
    def has_loss(self) -> bool:
        """Whether the passes compute the loss."""
        return self.span.is_last and (not self.infers or self.span.infers_gradients)

    @property
    def differentiates_input(self) -> bool:
        """Whether backward computes a gradient for the module's input, even if no parameter before the module is trained."""
        return self.span.differentiates_input and (not self.infers or self.span.infers_gradients)
