"""One redistribution of a distributed tensor, as data. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from equivcheck.system.choice import PrintableEnum

Coordinate = tuple[int, ...]
"""Where a rank stands, by mesh axis."""


class Held(PrintableEnum):
    """What ranks along a mesh axis hold of a tensor."""

    REPLICATE = "replicate"
    SHARD = "shard"
    STRIDED = "strided"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What ranks along one mesh axis hold."""

    held: Held = Held.REPLICATE
    """All of it, a part, or an addend."""
    dim: int = 0
    """Of a part: the dim that is cut."""
    split: int = 1
    """Of a strided part: pieces that the dim is cut into first; each is then cut along the axis."""
    op: str = ""
    """Of an addend: how addends are put together."""

    @property
    def cuts(self) -> bool:
        """Whether ranks hold different elements."""
        return self.held in (Held.SHARD, Held.STRIDED)


Placements = tuple[Placement, ...]


def strided(mesh: tuple[int, ...], placements: Placements, order: tuple[int, ...]) -> Placements:
    """The placements that cut in another order of axes, as torch writes them.

    An axis cuts pieces, of which later axes of the mesh have made some before.
    """
    found = []
    for axis, placement in enumerate(placements):
        before = [mesh[other] for other in order[: order.index(axis)] if other > axis and placements[other] == placement]
        split = math.prod(before)
        found.append(replace(placement, held=Held.STRIDED, split=split) if placement.cuts and split > 1 else placement)
    return tuple(found)


def in_order(placements: Placements) -> Placements:
    """The placements that cut dims in the order of the axes."""
    return tuple(replace(each, held=Held.SHARD, split=1) if each.held is Held.STRIDED else each for each in placements)


class Order(PrintableEnum):
    """Which rank has which coordinate."""

    ROWS = "rows"
    """The next rank is the next along the last axis."""
    COLUMNS = "columns"
    """The next rank is the next along the first axis."""
    DESCENDING = "descending"
    """As rows, from the last rank to the first; see `differences`."""


class Start(PrintableEnum):
    """How the distributed tensor is made."""

    FROM_LOCAL = "from_local"
    """Of the parts that ranks have."""
    DISTRIBUTED = "distributed"
    """Of the whole tensor, which is scattered and broadcast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """A distributed tensor, and how it is to lie afterwards."""

    mesh: tuple[int, ...]
    """Sizes of the axes."""
    order: Order = Order.ROWS
    """Which rank has which coordinate."""
    flattened: bool = False
    """Whether the mesh has been flattened, which lets torch communicate once where it would twice."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    source: Placements
    """How it lies, by mesh axis."""
    target: Placements
    """How it shall lie."""
    start: Start = Start.FROM_LOCAL
    """How it is made."""
    transposed: bool = False
    """Whether parts lie in memory with their dims reversed; of `FROM_LOCAL`."""
    asynchronous: bool = False
    """Whether the redistribution is waited for only when its result is used."""
    whole: bool = False
    """Whether ``full_tensor`` is asked for it, which can only replicate."""
    pending: tuple[bool, ...] = ()
    """By mesh axis: whether the gradients of what is replicated are addends; empty for no axis."""
    seed: int = 0
    """Of the numbers."""

    @property
    def both(self) -> tuple[Placements, Placements]:
        """How it lies before and afterwards."""
        return self.source, self.target

    @property
    def reduced(self) -> tuple[int, ...]:
        """The axes along which addends are put together."""
        both = enumerate(zip(self.source, self.target, strict=True))
        return tuple(axis for axis, (one, other) in both if one.held is Held.PARTIAL and other != one)

    @property
    def op(self) -> str:
        """How; empty where none are."""
        return self.source[self.reduced[0]].op if self.reduced else ""

    def coordinates(self) -> Iterator[Coordinate]:
        """Every rank's, by rank."""
        if self.order is Order.COLUMNS:
            return (found[::-1] for found in itertools.product(*map(range, self.mesh[::-1])))
        found = list(itertools.product(*map(range, self.mesh)))
        return iter(found[::-1] if self.order is Order.DESCENDING else found)

    def cut_by(self, placements: Placements, dim: int) -> list[int]:
        """The sizes of the axes that cut a dim."""
        return [size for size, each in zip(self.mesh, placements, strict=True) if each.cuts and each.dim == dim]

    def is_uneven(self, placements: Placements, dim: int) -> bool:
        """Whether not all parts of a dim need be of the same size."""
        pieces = max((each.split for each in placements if each.cuts and each.dim == dim), default=1)
        return self.shape[dim] % (pieces * math.prod(self.cut_by(placements, dim))) != 0
