"""What every kind of parallelism has."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from equivcheck.scenario.noun import noun
from equivcheck.system.choice import Choice


class Owner(Choice):
    """What part of a model a parameter belongs to."""

    MODEL = "model"
    SOURCE = "source"
    LAYER = "layer"
    HEAD = "head"


class ParameterFacts(Protocol):
    """What a parallelism asks about a parameter."""

    @property
    def owner(self) -> Owner:
        """What part of the model it belongs to."""

    @property
    def layer(self) -> int | None:
        """Index of the layer that owns it; None for a parameter of the model itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape."""

    @property
    def trained(self) -> bool:
        """Whether it requires a gradient."""

    @property
    def column_dim(self) -> int | None:
        """The dim that a column-parallel layer cuts; None for what it leaves whole."""

    @property
    def row_dim(self) -> int | None:
        """The dim that a row-parallel layer cuts; None for what it leaves whole."""

    @property
    def within_dim(self) -> int | None:
        """The dim that a layer cuts whose units within are shared out; None for what it leaves whole."""

    @property
    def expert_dim(self) -> int | None:
        """The dim along which experts lie; None for what belongs to none of them."""


@noun
class Parallelism:
    """Base of every kind of parallelism; third parties subclass it and register a layout for it."""

    tag: ClassVar[str]
    """Its name in JSON, on the command line and in reports."""
    axes: ClassVar[tuple[tuple[str, ...], ...]]
    """The mesh axes that it may spread over, as alternatives."""

    traceable: ClassVar[bool] = False
    """Whether a step under it can be traced as one graph: operations do all that it does, no hooks outside them."""
    cuts_positions: ClassVar[bool] = False
    """Whether ranks along its axes have different positions of the same sequences, so that it runs nothing but sequences."""
    shares_units: ClassVar[bool] = False
    """Whether ranks along its axes share out the units, such as experts, of layers that give rows to some."""

    @property
    def trains_local_tensors(self) -> bool:
        """Whether it puts local tensors in the place of DTensors, so that an optimizer sees plain tensors only."""
        return False

    def cut_dim(self, parameter: ParameterFacts) -> int | None:  # noqa: ARG002 - for those that cut
        """The dim along which it cuts a parameter into the parts of `torch.chunk`; None for one that it leaves whole.

        Flat parameters, which are cut anywhere, do not count.
        """
        return None

    def require_ranks(self, count: int) -> None:
        """Raise `InvalidScenario` where it cannot spread over that many ranks; any number will do unless a subclass says so."""

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Print as code: Hypothesis would write class variables as if they were arguments."""
        printer.text(repr(self))
