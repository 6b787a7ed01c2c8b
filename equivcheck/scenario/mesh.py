"""The mesh of ranks."""

from __future__ import annotations

import math

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.noun import noun, refuse, require_between

MAX_RANKS = 8
"""Most ranks of generated scenarios."""
MAX_NAME = 64
"""Characters of an axis' name."""

DP = "dp"
"""The axis of plain data parallelism."""
REPLICATE = "dp_replicate"
"""The axis of hybrid sharding along which shards are replicated."""
SHARD = "dp_shard"
"""The axis of hybrid sharding along which parameters are sharded."""
TP = "tp"
"""The axis of tensor parallelism."""
EP = "ep"
"""The axis of expert parallelism, along which rows are cut as well."""
PP = "pp"
"""The axis of pipeline parallelism."""
CP = "cp"
"""The axis of context parallelism."""


@noun
class Axis:
    """One axis of a mesh."""

    name: str
    """``dp``, ``dp_replicate``, ``dp_shard``, ``tp``, ``ep``, ``pp``, ``cp`` or what a third party's parallelism calls its own.

    1 to 64 printable characters."""
    size: int
    """Ranks along it, 1 to 1,048,576."""

    def __post_init__(self) -> None:
        if not (1 <= len(self.name) <= MAX_NAME and self.name.isprintable()):
            raise refuse(self, "name", f"1 to {MAX_NAME} printable characters")
        require_between(self, "size", 1, 2**20)


@noun
class Mesh:
    """Ranks in row-major order over the axes: the last axis is that of neighbours."""

    axes: tuple[Axis, ...]
    """1 to 3 axes, outermost first, names distinct."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.axes) <= 3:
            raise InvalidScenario(f"Mesh.axes has {len(self.axes)} axes; allowed: 1 to 3")
        if len(set(self.names)) != len(self.names):
            raise InvalidScenario(f"Mesh.axes has the names {self.names}; allowed: distinct ones")

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    @property
    def num_ranks(self) -> int:
        """Ranks in the mesh."""
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The rank's index along each axis, outermost first; `rank` is 0 to ``num_ranks - 1``."""
        found: list[int] = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            found.append(index)
        return tuple(reversed(found))

    def size(self, *names: str) -> int:
        """Ranks along the axes of those names together; an axis that the mesh lacks counts as 1."""
        return math.prod(axis.size for axis in self.axes if axis.name in names)
