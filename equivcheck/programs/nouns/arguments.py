"""Builds arguments that fit an operation."""

from __future__ import annotations

import math

from equivcheck.programs.nouns.operations.operation import Argument, ArgumentKind, OperationFacts, Shape
from equivcheck.programs.nouns.program import MAX_ELEMENTS, Constant, Contents, Leaf


def dims_of(facts: OperationFacts, shape: Shape) -> tuple[int, ...]:
    """Return the ``dim`` arguments that a sweep tries for an operation: each dim, counted from the front and from the end.

    If the operation takes no ``dim``, the only item is 0.
    """
    return tuple(range(-len(shape), len(shape))) or (0,) if facts.takes_dim else (0,)


def shapes_of(argument: Argument, shape: Shape, dim: int) -> list[Shape]:
    """Return the possible shapes for this argument if the operation's first argument has shape `shape`.

    The list has no duplicates. It is empty if the first argument has too few dims.
    """
    found: dict[Shape, None] = {}
    for shape_of in argument.shapes:
        try:
            made = shape_of(shape, dim)
        except IndexError:
            continue
        if all(size >= 0 for size in made) and math.prod(made) <= MAX_ELEMENTS:
            found[made] = None
    return list(found)


def make(argument: Argument, made: Shape, placements: tuple[str, ...], *, seed: int, high: int) -> Leaf | Constant:
    """Build a leaf or constant for this argument, with shape `made`. Integer values are below `high`."""
    if argument.kind is ArgumentKind.LEAF:
        return Leaf(shape=made, placements=placements, seed=seed)
    if argument.kind is ArgumentKind.ORDER and made:
        high = max(high, made[-1])
    return Constant(shape=made, placements=placements, contents=Contents(argument.kind.value), high=high, seed=seed)
