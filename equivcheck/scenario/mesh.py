"""Device mesh: named axes with sizes."""

from __future__ import annotations

import math

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between

MAX_RANKS = 8
"""Maximum ranks in generated scenarios."""
MAX_AXES = 3
"""Maximum axes of a mesh."""
MAX_NAME = 64
"""Maximum characters in an axis name."""

DP = "dp"
"""Axis for plain data parallelism."""
REPLICATE = "dp_replicate"
"""Replicating axis in hybrid sharding (HSDP)."""
SHARD = "dp_shard"
"""Sharding axis in hybrid sharding (HSDP)."""
TP = "tp"
"""Axis for tensor parallelism."""
EP = "ep"
"""Axis for expert parallelism; rows are sharded along it too."""
PP = "pp"
"""Axis for pipeline parallelism."""
CP = "cp"
"""Axis for context parallelism."""


@frozen_dataclass
class Axis:
    """One axis of a mesh: name and number of ranks."""

    name: str
    """``dp``, ``dp_replicate``, ``dp_shard``, ``tp``, ``ep``, ``pp``, ``cp``, or a name that a third-party parallelism uses.

    1 to 64 printable characters."""
    size: int
    """Number of ranks along the axis, 1 to 1,048,576."""

    def __post_init__(self) -> None:
        if not (1 <= len(self.name) <= MAX_NAME and self.name.isprintable()):
            raise invalid_field(self, "name", f"1 to {MAX_NAME} printable characters")
        require_between(self, "size", 1, 2**20)


@frozen_dataclass
class Mesh:
    """Device mesh: named axes with sizes. Ranks are in row-major order, so neighbours on the last axis have consecutive ranks."""

    axes: tuple[Axis, ...]
    """1 to 3 axes with distinct names, outermost first."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.axes) <= MAX_AXES:
            raise InvalidScenario(f"Mesh.axes of length {len(self.axes)} is not valid. Expected 1 to {MAX_AXES} axes.")
        if len(set(self.names)) != len(self.names):
            raise InvalidScenario(f"Mesh.axes with the names {self.names} is not valid. Expected distinct names.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Index of a rank along each axis, outermost first; `rank` is 0 to ``num_ranks - 1``."""
        found: list[int] = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            found.append(index)
        return tuple(reversed(found))

    def lines(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks along one axis. Within a group, only the index along this axis differs."""
        axis, found = self.names.index(name), dict[tuple[int, ...], list[int]]()
        for rank in range(self.num_ranks):
            coordinate = self.coordinate(rank)
            found.setdefault((*coordinate[:axis], *coordinate[axis + 1 :]), []).append(rank)
        return tuple(map(tuple, found.values()))

    def size(self, *names: str) -> int:
        """Product of the named axes' sizes; an axis that the mesh does not have counts as 1."""
        return math.prod(axis.size for axis in self.axes if axis.name in names)
