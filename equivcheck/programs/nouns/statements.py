"""Statements in a tensor program. Each produces one value and refers to arguments by distance: 1 is the previous value."""

from __future__ import annotations

import math
from typing import ClassVar

from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.nouns.placement import require_placements
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between
from equivcheck.system.choice import PrintableEnum

MAX_ELEMENTS = 4096
"""Maximum elements in a value. Programs test placements, and few elements show errors as well as many."""


class Contents(PrintableEnum):
    """Contents of a constant."""

    INDICES = "indices"
    """Integers from 0 to below `high`, with repetitions."""
    ORDER = "order"
    """Integers from 0 to below `high`, distinct along the last dim."""
    MASK = "mask"
    """Booleans."""
    WEIGHTS = "weights"
    """Positive numbers."""


def _require_shape(owner: object, shape: tuple[int, ...]) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise invalid_field(owner, "shape", f"sizes of at least 0, at most {MAX_ELEMENTS} elements")


@frozen_dataclass
class Leaf:
    """A float64 tensor with distinct values, whose gradient is compared."""

    tag: ClassVar[str] = "leaf"
    shape: tuple[int, ...]
    """Full shape with any number of dims."""
    placements: tuple[str, ...]
    """Placement for each mesh axis."""
    seed: int = 0
    """Seed for the values, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        _require_shape(self, self.shape)
        require_placements(self, self.placements, len(self.shape))
        require_between(self, "seed", 0, 2**32 - 1)


@frozen_dataclass
class Constant:
    """A tensor without a gradient: indices, targets, masks, weights."""

    tag: ClassVar[str] = "constant"
    shape: tuple[int, ...]
    """Full shape with any number of dims."""
    placements: tuple[str, ...]
    """Placement for each mesh axis: replicated or sharded."""
    contents: Contents
    """Kind of values."""
    high: int = 1
    """Exclusive upper bound for integers, at least 1."""
    seed: int = 0
    """Seed for the values, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        _require_shape(self, self.shape)
        require_placements(self, self.placements, len(self.shape))
        require_between(self, "seed", 0, 2**32 - 1)
        require_between(self, "high", 1, MAX_ELEMENTS)
        if any(placement.startswith("P") for placement in self.placements):
            raise invalid_field(self, "placements", "replicated or sharded, because only leaves can be partial")
        if self.contents is Contents.ORDER and self.shape and self.shape[-1] > self.high:
            raise invalid_field(
                self, "high", f"at least {self.shape[-1]}, so that the numbers along the last dim can be distinct"
            )


@frozen_dataclass
class Operation:
    """A torch call. If one device refuses the call or its result cannot be compared, the statement clones its first argument."""

    tag: ClassVar[str] = "operation"
    name: str
    """A name in `OPERATIONS`."""
    arguments: tuple[int, ...] = (1,)
    """Distances back to the argument values, one per argument."""
    dim: int = 0
    """Dim to work on, counted from the end if negative; 0 if the operation takes none."""
    output: int = 0
    """Index of the result used by later statements. Other results are compared, but take no part in gradients."""

    def __post_init__(self) -> None:
        if self.name not in OPERATIONS:
            raise invalid_field(self, "name", f"one of the {len(OPERATIONS)} names in OPERATIONS")
        operation = OPERATIONS[self.name]
        if len(self.arguments) != operation.num_arguments:
            raise invalid_field(self, "arguments", f"{operation.num_arguments} arguments for {self.name}")
        if self.dim and not operation.takes_dim:
            raise invalid_field(self, "dim", f"0, because {self.name} takes no dim")
        require_between(self, "dim", -9, 9)
        require_between(self, "output", 0, 9)


@frozen_dataclass
class Redistribution:
    """Changes placements. If the value lacks a dim to be sharded, the statement clones it."""

    tag: ClassVar[str] = "redistribution"
    placements: tuple[str, ...]
    """New placement for each mesh axis."""
    argument: int = 1
    """Distance back to the value."""

    def __post_init__(self) -> None:
        require_placements(self, self.placements)


@frozen_dataclass
class RoundTrip:
    """`to_local` and back with `from_local`, keeping placements and shape."""

    tag: ClassVar[str] = "round_trip"
    argument: int = 1
    """Distance back to the value."""


Statement = Leaf | Constant | Operation | Redistribution | RoundTrip


def arguments_of(statement: Statement) -> tuple[int, ...]:
    """Distances back to a statement's arguments; empty for leaves and constants."""
    if isinstance(statement, Operation):
        return statement.arguments
    return (statement.argument,) if isinstance(statement, (Redistribution, RoundTrip)) else ()
