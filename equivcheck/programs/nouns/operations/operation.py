"""Facts about each torch operation in tensor programs. Its call is a text, the same for plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equivcheck.system.choice import PrintableEnum

Shape = tuple[int, ...]

MATRICES: tuple[Shape, ...] = ((4, 6), (5, 3), (1, 4), (0, 3))
"""Matrices for the first argument: even and uneven on two ranks, with a one-element dim, and empty."""
VECTORS: tuple[Shape, ...] = ((4,), (5,), (1,), (0,))
CUBES: tuple[Shape, ...] = ((2, 3, 4), (3, 4, 2))
BATCHES: tuple[Shape, ...] = ((2, 3, 5), (4, 1, 6))
IMAGES: tuple[Shape, ...] = ((2, 4, 6), (3, 2, 5))
"""Shapes with rows, channels and positions."""
ANY: tuple[Shape, ...] = ((), *VECTORS[:2], *MATRICES, CUBES[0])
"""Shapes of the first argument for most operations."""


class ArgumentKind(PrintableEnum):
    """How a program creates an operation's second or later argument."""

    LEAF = "leaf"
    INDICES = "indices"
    ORDER = "order"
    MASK = "mask"
    WEIGHTS = "weights"


ShapeOf = Callable[[Shape, int], Shape]
"""Function to compute a shape from the first argument's shape and the dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An operation's second or later argument."""

    shapes: tuple[ShapeOf, ...]
    """Functions that compute the argument's shape from the first argument's shape and ``dim``. There are several if the operation
    broadcasts.
    """
    kind: ArgumentKind = ArgumentKind.LEAF
    """Values in the argument, such as indices or a mask."""
    high: Callable[[Shape, int], int] = lambda _shape, _dim: 1
    """Function from the first argument's shape and ``dim`` to the exclusive upper bound for integer values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFacts:
    """The call and the arguments of one torch operation. Programs may pass any finite inputs that one device accepts.

    Expected results are not stored here, because one device computes them.
    """

    name: str
    """Unique name."""
    call: str
    """Python statements that compute the result from ``torch``, ``F``, the arguments ``a``, ``b``, ``c``, and ``dim``. The last
    one is an expression.
    """
    arguments: tuple[Argument, ...] = ()
    """Arguments after the first."""
    takes_dim: bool = False
    """Whether the call uses the argument ``dim``."""
    shapes: tuple[Shape, ...] = ANY
    """The first argument's shapes in a sweep."""
    distinct: bool = False
    """Whether the first argument needs distinct values, because torch does not define which equal value comes first."""

    drawn: bool = True
    """Whether generated programs use the operation by default. Sweeps use all operations."""

    @property
    def num_arguments(self) -> int:
        """How many tensors the operation takes."""
        return 1 + len(self.arguments)


def first_shape(shape: Shape, _dim: int) -> Shape:
    """Return the first argument's shape, for another argument with the same shape."""
    return shape


def last_dim(shape: Shape, _dim: int) -> Shape:
    """Return the shape for a vector as long as the first argument's last dim."""
    return shape[-1:]


def row(shape: Shape, _dim: int) -> Shape:
    """Return the first argument's shape with its first dim reduced to one element, for broadcasting."""
    return (1, *shape[1:])


def column(shape: Shape, _dim: int) -> Shape:
    """Return the first argument's shape with its last dim reduced to one element, for broadcasting."""
    return (*shape[:-1], 1) if shape else ()


def scalar(_shape: Shape, _dim: int) -> Shape:
    """Return the shape for a tensor without dims, whatever the first argument's shape is."""
    return ()


def size_along(shape: Shape, dim: int) -> int:
    """Return the first argument's size along `dim`, or 1 if the size is 0 or there is no such dim."""
    return max(1, shape[dim]) if shape and -len(shape) <= dim < len(shape) else 1


def operations(calls: dict[str, str], **given: object) -> tuple[OperationFacts, ...]:
    """Build an `OperationFacts` for each item in `calls`, which maps names to calls. `given` contains their common fields."""
    return tuple(OperationFacts(name=name, call=call, **given) for name, call in calls.items())  # type: ignore[arg-type]
