"""How activations are moved around each module of a plan, and their gradients back."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.layouts.base.plan.linears import (
    BY_ROWS,
    COLUMN,
    OF_SHARDING,
    ROW,
    WHOLE,
    ActivationPlacement,
    Linear,
    Passage,
)
from equivcheck.scenario import ActivationSharding, Split

_LINEARS = {Split.COLUMN: COLUMN, Split.ROW: ROW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A move of an activation, and that of its gradient."""

    source: ActivationPlacement
    """How values lie."""
    target: ActivationPlacement
    """How they are to lie."""
    gradient_source: ActivationPlacement
    """How the gradient of what is returned lies."""
    gradient_target: ActivationPlacement
    """How the gradient of the values is to lie."""
    features: int
    """Features of all ranks together."""

    @property
    def moves(self) -> bool:
        """Whether there is anything to do, in either direction."""
        return self.source is not self.target or self.gradient_source is not self.gradient_target


SUMMED = Route(
    source=ActivationPlacement.PENDING,
    target=ActivationPlacement.WHOLE,
    gradient_source=ActivationPlacement.WHOLE,
    gradient_target=ActivationPlacement.WHOLE,
    features=0,
)
"""Addends of ranks to their sum on each of them."""
COPIED = Route(
    source=ActivationPlacement.WHOLE,
    target=ActivationPlacement.WHOLE,
    gradient_source=ActivationPlacement.PENDING,
    gradient_target=ActivationPlacement.WHOLE,
    features=0,
)
"""What every rank has, for each to compute an addend with: the other way round."""


def entering(told: Passage, features: int) -> Route:
    """From how a linear finds its input to how it needs it."""
    linear, before = _linear(told), OF_SHARDING[told.input]
    return Route(
        source=before,
        target=linear.wanted,
        gradient_source=linear.input_gradient,
        gradient_target=before,
        features=features,
    )


def leaving(told: Passage, features: int) -> Route:
    """From how the output of a linear comes out to how it is to lie."""
    return _leaving(_linear(told).made, told.output, features)


def gathered(input: ActivationSharding, features: int) -> Route:
    """From how a layer finds its input to all of it on every rank, which computes alike with it."""
    whole, before = ActivationPlacement.WHOLE, OF_SHARDING[input]
    return Route(source=before, target=whole, gradient_source=whole, gradient_target=before, features=features)


def summed(output: ActivationSharding, features: int) -> Route:
    """From addends of a layer's output to how it is to lie."""
    return _leaving(ActivationPlacement.PENDING, output, features)


def embedded(split: Split, output: ActivationSharding, features: int) -> Route:
    """The same of an embedding."""
    return _leaving(_LINEARS.get(split, WHOLE).made, output, features)


def _leaving(made: ActivationPlacement, output: ActivationSharding, features: int) -> Route:
    """The gradient of addends is that of their sum."""
    after = OF_SHARDING[output]
    back = ActivationPlacement.WHOLE if made is ActivationPlacement.PENDING else made
    return Route(source=made, target=after, gradient_source=after, gradient_target=back, features=features)


def _linear(told: Passage) -> Linear:
    return BY_ROWS if told.is_by_rows else _LINEARS.get(told.split, WHOLE)
