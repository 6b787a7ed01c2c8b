"""Facts about each operation. Its call is a text, the same for plain tensors and DTensors."""

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
    """How a program creates an additional argument."""

    LEAF = "leaf"
    INDICES = "indices"
    ORDER = "order"
    MASK = "mask"
    WEIGHTS = "weights"


ShapeOf = Callable[[Shape, int], Shape]
"""Function to compute a shape from the first argument's shape and the dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An additional argument, described so that the operation applies to it."""

    shapes: tuple[ShapeOf, ...]
    """Shape, computed from the first argument's shape and the dim. Several shapes if the operation broadcasts."""
    kind: ArgumentKind = ArgumentKind.LEAF
    """Kind of argument."""
    high: Callable[[Shape, int], int] = lambda _shape, _dim: 1
    """Exclusive upper bound for integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFacts:
    """A torch call and its arguments. It applies to all finite inputs that one device accepts.

    Shapes, results and expected values need no description, because one device computes them.
    """

    name: str
    """Unique name."""
    call: str
    """Python statements, the last an expression, over ``torch``, ``F``, the arguments ``a``, ``b``, ``c``, and ``dim``."""
    arguments: tuple[Argument, ...] = ()
    """Arguments after the first."""
    takes_dim: bool = False
    """Whether the call uses ``dim``."""
    shapes: tuple[Shape, ...] = ANY
    """First argument's shapes in a sweep."""
    distinct: bool = False
    """Whether the first argument needs distinct values, because torch does not define which equal value comes first."""

    drawn: bool = True
    """Whether random programs use the operation by default. Sweeps use all operations."""

    @property
    def num_arguments(self) -> int:
        """Return the number of tensor arguments."""
        return 1 + len(self.arguments)


def first_shape(shape: Shape, _dim: int) -> Shape:
    """Return the first argument's shape."""
    return shape


def last_dim(shape: Shape, _dim: int) -> Shape:
    """Return the last dim of the first argument, as a shape."""
    return shape[-1:]


def row(shape: Shape, _dim: int) -> Shape:
    """Return the shape of one row of the first argument: its first dim has one element."""
    return (1, *shape[1:])


def column(shape: Shape, _dim: int) -> Shape:
    """Return the shape of one column of the first argument: its last dim has one element."""
    return (*shape[:-1], 1) if shape else ()


def scalar(_shape: Shape, _dim: int) -> Shape:
    """Return the shape of a tensor without dims."""
    return ()


def size_along(shape: Shape, dim: int) -> int:
    """Return the size along a dim, at least 1."""
    return max(1, shape[dim]) if shape and -len(shape) <= dim < len(shape) else 1


def operations(calls: dict[str, str], **given: object) -> tuple[OperationFacts, ...]:
    """Build an entry for each name and call. All other facts are shared."""
    return tuple(OperationFacts(name=name, call=call, **given) for name, call in calls.items())  # type: ignore[arg-type]
