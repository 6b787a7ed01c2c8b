"""A rank's calls and bytes, by step, stage, operation and mesh axes.

Recorded calls (`equivcheck.worlds.call.Call`) and predictions use the same types, so they can be compared. Bytes count a rank's
input tensors, like `Call.num_bytes`: its own shard for an all-gather, its full tensor for a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from equivcheck.scenario import Mesh
from equivcheck.worlds.call import Call
from equivcheck.worlds.trace.stage import Stage

Key = tuple[int, Stage, str, str]
"""Step, stage, op and axes. Calls with the same key are summed."""

_BETWEEN_AXES = " x "
"""Text between mesh axes in the name of a group."""
_RANKS = "ranks "
"""Start of the name of a group that is no submesh."""

Totals = dict[Key, tuple[int, int]]
"""Calls and bytes for each key."""

_ORDER = {stage: number for number, stage in enumerate(Stage)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One rank's collective calls with the same step, stage in the train loop, operation and process group."""

    step: int
    """Step, from 0. `BEFORE_STEPS` for the setup."""
    stage: Stage
    """Stage in the train loop."""
    op: str
    """Operation, named like `Call.op`."""
    axes: str
    """The group's mesh axes, such as ``dp`` or ``dp x tp``, without axes that have one rank. Other groups list their ranks."""
    num_calls: int
    """Number of calls, at least 1."""
    num_bytes: int
    """Bytes in the rank's input tensors, summed over all calls."""

    def describe(self) -> str:
        """Return a text with calls and bytes, such as ``3 calls, 1,024 bytes``."""
        return describe_calls(self.num_calls, self.num_bytes)


def describe_calls(num_calls: int, num_bytes: int) -> str:
    """Return a text with the given calls and bytes, such as ``1 call, 8 bytes`` or ``no call``."""
    if not num_calls:
        return "no call"
    return f"{num_calls:,} {'call' if num_calls == 1 else 'calls'}, {num_bytes:,} bytes"


def traffic(calls: Iterable[Call], mesh: Mesh) -> tuple[Traffic, ...]:
    """Count one rank's recorded calls by step, stage, operation and group. The result is sorted in this order."""
    return to_traffic(totals(calls, mesh))


def totals(calls: Iterable[Call], mesh: Mesh, without: Sequence[Stage] = ()) -> Totals:
    """Count one rank's collective calls and bytes by step, stage, operation and group. Stages in `without` are left out."""
    summed: dict[tuple[int, Stage, str, tuple[int, ...]], list[int]] = {}
    for call in calls:
        if call.stage in without:
            continue
        entry = summed.setdefault((call.step, call.stage, call.op, call.ranks), [0, 0])
        entry[0] += 1
        entry[1] += call.num_bytes
    found: Totals = {}
    for (step, stage, op, ranks), (num_calls, num_bytes) in summed.items():
        add(found, (step, stage, op, axes_of(ranks, mesh)), num_calls, num_bytes)
    return found


def add(found: Totals, key: Key, num_calls: int, num_bytes: int) -> None:
    """Add calls and bytes to the counts in `found` under `key`."""
    before_calls, before_bytes = found.get(key, (0, 0))
    found[key] = before_calls + num_calls, before_bytes + num_bytes


def to_traffic(found: Totals) -> tuple[Traffic, ...]:
    """Convert counts to `Traffic`, sorted by step and stage."""
    ordered = sorted(found.items(), key=lambda item: order_of(item[0]))
    return tuple(
        Traffic(step=step, stage=stage, op=op, axes=axes, num_calls=num_calls, num_bytes=num_bytes)
        for (step, stage, op, axes), (num_calls, num_bytes) in ordered
    )


def order_of(key: Key) -> tuple[int, int, str, str]:
    """Sort key for an entry of the counts: step, stage, then names."""
    step, stage, op, axes = key
    return step, _ORDER[stage], op, axes


def group_name(names: Iterable[str], mesh: Mesh) -> str:
    """Return the name of the group over these mesh axes. Axes with one rank are left out."""
    wanted = set(names)
    return _BETWEEN_AXES.join(axis.name for axis in mesh.axes if axis.name in wanted and axis.size > 1)


@lru_cache(maxsize=1024)
def axes_of(ranks: tuple[int, ...], mesh: Mesh) -> str:
    """Return the name of the group with these global ranks: its mesh axes, or its ranks if they do not form a submesh."""
    coordinates = [mesh.coordinate(rank) for rank in ranks]
    along = [sorted({coordinate[axis] for coordinate in coordinates}) for axis in range(len(mesh.axes))]
    whole = all(len(found) in (1, axis.size) for found, axis in zip(along, mesh.axes, strict=True))
    if not whole or sorted(coordinates) != sorted(product(*along)):
        return f"{_RANKS}{', '.join(map(str, ranks))}"
    return group_name([axis.name for found, axis in zip(along, mesh.axes, strict=True) if len(found) > 1], mesh)


def axes_along(group: str, mesh: Mesh) -> set[str]:
    """Return the mesh axes along which the ranks in a group differ, given the group's name."""
    if not group.startswith(_RANKS):
        return set(group.split(_BETWEEN_AXES))
    coordinates = [mesh.coordinate(int(rank)) for rank in group.removeprefix(_RANKS).split(", ")]
    return {name for name, indices in zip(mesh.names, zip(*coordinates, strict=True), strict=True) if len(set(indices)) > 1}
