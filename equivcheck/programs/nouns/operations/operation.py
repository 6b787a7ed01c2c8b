"""What an operation of tensor programs is: facts, of which the call is a text, the same for plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equivcheck.system.choice import Choice

Shape = tuple[int, ...]

MATRICES: tuple[Shape, ...] = ((4, 6), (5, 3), (1, 4), (0, 3))
"""First arguments of two dims: even and uneven on two ranks, with a dim of one element, empty."""
VECTORS: tuple[Shape, ...] = ((4,), (5,), (1,), (0,))
CUBES: tuple[Shape, ...] = ((2, 3, 4), (3, 4, 2))
BATCHES: tuple[Shape, ...] = ((2, 3, 5), (4, 1, 6))
IMAGES: tuple[Shape, ...] = ((2, 4, 6), (3, 2, 5))
"""Rows, channels, places."""
ANY: tuple[Shape, ...] = ((), *VECTORS[:2], *MATRICES, CUBES[0])
"""First arguments that most operations take."""


class Kind(Choice):
    """What an argument beside the first is, where a program has to make one."""

    LEAF = "leaf"
    INDICES = "indices"
    ORDER = "order"
    MASK = "mask"
    WEIGHTS = "weights"


ShapeOf = Callable[[Shape, int], Shape]
"""A shape from that of the first argument and the dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument beside the first, as it can be made so that the operation applies."""

    shapes: tuple[ShapeOf, ...]
    """Its shape, from that of the first argument and the dim; several where an operation broadcasts."""
    kind: Kind = Kind.LEAF
    """What it holds."""
    high: Callable[[Shape, int], int] = lambda _shape, _dim: 1
    """Of integers, one more than the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFacts:
    """One call of torch.

    It applies wherever one device computes it, on plain tensors, to finite numbers: nothing more is stated of shapes, results or
    expected values.
    """

    name: str
    """Unique."""
    call: str
    """Statements of Python, the last an expression: over ``torch``, ``F``, the arguments ``a``, ``b``, ``c``, and ``dim``."""
    family: str
    """What it is one of, for people."""
    arguments: tuple[Argument, ...] = ()
    """Arguments beside the first."""
    takes_dim: bool = False
    """Whether the call has ``dim``."""
    shapes: tuple[Shape, ...] = ANY
    """Shapes of the first argument in a sweep."""
    distinct: bool = False
    """Whether it says nothing where values of its first argument are equal: which of them comes first is nobody's promise."""

    drawn: bool = True
    """Whether random programs draw it if nobody asks for it; sweeps have all."""

    @property
    def num_arguments(self) -> int:
        """Tensors that it takes."""
        return 1 + len(self.arguments)


def same(shape: Shape, _dim: int) -> Shape:
    """The shape of the first argument."""
    return shape


def last(shape: Shape, _dim: int) -> Shape:
    """Its last dim."""
    return shape[-1:]


def row(shape: Shape, _dim: int) -> Shape:
    """One row of it, with a dim of one element."""
    return (1, *shape[1:])


def column(shape: Shape, _dim: int) -> Shape:
    """One element of each row."""
    return (*shape[:-1], 1) if shape else ()


def scalar(_shape: Shape, _dim: int) -> Shape:
    """No dims."""
    return ()


def size_along(shape: Shape, dim: int) -> int:
    """The extent of a dim, at least 1."""
    return max(1, shape[dim]) if shape and -len(shape) <= dim < len(shape) else 1


def facts(family: str, table: dict[str, str], **given: object) -> tuple[OperationFacts, ...]:
    """Operations of a family that differ in name and call alone."""
    return tuple(OperationFacts(name=name, call=call, family=family, **given) for name, call in table.items())  # type: ignore[arg-type]
