"""The statements of a tensor program; each leaves one value. Arguments are distances back: 1 is the value before."""

from __future__ import annotations

import math
from typing import ClassVar

from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import require_placements
from equivcheck.scenario.noun import noun, refuse, require_between
from equivcheck.system.choice import Choice

MAX_ELEMENTS = 4096
"""Of any value: programs are about where elements lie, which few show as well as many."""


class Contents(Choice):
    """What a constant holds."""

    INDICES = "indices"
    """Integers from 0 to below `high`, some of them repeated."""
    ORDER = "order"
    """Integers from 0 to below `high`, distinct along the last dim."""
    MASK = "mask"
    """Booleans."""
    WEIGHTS = "weights"
    """Positive numbers."""


def _require_shape(owner: object, shape: tuple[int, ...]) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise refuse(owner, "shape", f"sizes of at least 0, at most {MAX_ELEMENTS} elements")


@noun
class Leaf:
    """A float64 tensor of distinct values, whose gradient is compared."""

    tag: ClassVar[str] = "leaf"
    shape: tuple[int, ...]
    """Full shape, any number of dims."""
    placements: tuple[str, ...]
    """Where it lies, one for each axis of the mesh."""
    seed: int = 0
    """Of its values, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        _require_shape(self, self.shape)
        require_placements(self, self.placements, len(self.shape))
        require_between(self, "seed", 0, 2**32 - 1)


@noun
class Constant:
    """A tensor without a gradient: indices, targets, masks, weights."""

    tag: ClassVar[str] = "constant"
    shape: tuple[int, ...]
    """Full shape, any number of dims."""
    placements: tuple[str, ...]
    """Where it lies, one for each axis of the mesh: replicated or cut."""
    contents: Contents
    """What it holds."""
    high: int = 1
    """Of integers, one more than the largest, at least 1."""
    seed: int = 0
    """Of its values, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        _require_shape(self, self.shape)
        require_placements(self, self.placements, len(self.shape))
        require_between(self, "seed", 0, 2**32 - 1)
        require_between(self, "high", 1, MAX_ELEMENTS)
        if any(placement.startswith("P") for placement in self.placements):
            raise refuse(self, "placements", "replicated or cut: addends are for leaves")
        if self.contents is Contents.ORDER and self.shape and self.shape[-1] > self.high:
            raise refuse(self, "high", f"at least {self.shape[-1]}, for as many distinct numbers")


@noun
class Operation:
    """A call of torch. Where one device refuses it, or what it leaves says nothing, its first argument is cloned instead."""

    tag: ClassVar[str] = "operation"
    name: str
    """Which one, of `OPERATIONS`."""
    arguments: tuple[int, ...] = (1,)
    """Distances back to the values that it takes, as many as it has arguments."""
    dim: int = 0
    """The dim along which it works, negative ones from the end; 0 where it takes none."""
    output: int = 0
    """Which of several results is the statement's value; the others are compared, and take no part in any gradient."""

    def __post_init__(self) -> None:
        if self.name not in OPERATIONS:
            raise refuse(self, "name", f"one of the {len(OPERATIONS)} names of OPERATIONS")
        operation = OPERATIONS[self.name]
        if len(self.arguments) != operation.num_arguments:
            raise refuse(self, "arguments", f"{operation.num_arguments} of them for {self.name}")
        if self.dim and not operation.takes_dim:
            raise refuse(self, "dim", f"0, as {self.name} takes no dim")
        require_between(self, "dim", -9, 9)
        require_between(self, "output", 0, 9)


@noun
class Redistribution:
    """A change of placements; where the value lacks a dim that is to be cut, a clone."""

    tag: ClassVar[str] = "redistribution"
    placements: tuple[str, ...]
    """What they become, one for each axis of the mesh."""
    argument: int = 1
    """Distance back to the value."""

    def __post_init__(self) -> None:
        require_placements(self, self.placements)


@noun
class RoundTrip:
    """`to_local` and back by `from_local`, with the placements and the shape that the value has."""

    tag: ClassVar[str] = "round_trip"
    argument: int = 1
    """Distance back to the value."""


Statement = Leaf | Constant | Operation | Redistribution | RoundTrip


def arguments_of(statement: Statement) -> tuple[int, ...]:
    """Distances back to what a statement takes; none for leaves and constants."""
    if isinstance(statement, Operation):
        return statement.arguments
    return (statement.argument,) if isinstance(statement, (Redistribution, RoundTrip)) else ()
