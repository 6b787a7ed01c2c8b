"""Communication in numbers: what the calls of a rank amount to, stage by stage.

`traffic` sums up recorded calls (`equivcheck.worlds.call.Call`, whose world heard the marks of the train loop); predictions are
the same nouns, so that the two can be compared. Bytes are those of the tensors that a rank puts in, as `Call.num_bytes` has them:
its own shard for an all-gather, all that it has for a reduce-scatter.
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
"""Step, stage, op and axes: what calls must have in common to be summed."""

Totals = dict[Key, tuple[int, int]]
"""Calls and bytes of each key."""

_ORDER = {stage: number for number, stage in enumerate(Stage)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls of one kind over one group that a rank issues in one stage of a step."""

    step: int
    """Step, from 0; `BEFORE_STEPS` in the setup."""
    stage: Stage
    """What the rank was doing."""
    op: str
    """As in `Call.op`."""
    axes: str
    """The mesh axes that the group spreads over, as ``dp`` or ``dp x tp``; axes of size 1 do not count; else its ranks."""
    num_calls: int
    """Calls, at least 1."""
    num_bytes: int
    """Bytes that the rank puts in, over all calls."""

    def describe(self) -> str:
        """As ``3 calls, 1,024 bytes``."""
        return described(self.num_calls, self.num_bytes)


def described(num_calls: int, num_bytes: int) -> str:
    """Calls and bytes for people: ``1 call, 8 bytes``, ``no call``."""
    if not num_calls:
        return "no call"
    return f"{num_calls:,} {'call' if num_calls == 1 else 'calls'}, {num_bytes:,} bytes"


def traffic(calls: Iterable[Call], mesh: Mesh) -> tuple[Traffic, ...]:
    """What the calls of one rank amount to, in the order of steps and stages."""
    return as_traffic(totals(calls, mesh))


def totals(calls: Iterable[Call], mesh: Mesh, without: Sequence[Stage] = ()) -> Totals:
    """The same, unordered, to be compared or added to; some stages may be left out."""
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
    """Count more calls under a key."""
    before_calls, before_bytes = found.get(key, (0, 0))
    found[key] = before_calls + num_calls, before_bytes + num_bytes


def as_traffic(found: Totals) -> tuple[Traffic, ...]:
    """Totals as nouns, in the order of steps and stages."""
    ordered = sorted(found.items(), key=lambda item: order_of(item[0]))
    return tuple(
        Traffic(step=step, stage=stage, op=op, axes=axes, num_calls=num_calls, num_bytes=num_bytes)
        for (step, stage, op, axes), (num_calls, num_bytes) in ordered
    )


def order_of(key: Key) -> tuple[int, int, str, str]:
    """Sorts keys by step and stage, then by name."""
    step, stage, op, axes = key
    return step, _ORDER[stage], op, axes


def axes_named(names: Iterable[str], mesh: Mesh) -> str:
    """What a group over those axes of a mesh is called; axes of size 1 are left out."""
    wanted = set(names)
    return " x ".join(axis.name for axis in mesh.axes if axis.name in wanted and axis.size > 1)


@lru_cache(maxsize=1024)
def axes_of(ranks: tuple[int, ...], mesh: Mesh) -> str:
    """What a group of global ranks is called: by the axes along which it spreads, else by its ranks."""
    coordinates = [mesh.coordinate(rank) for rank in ranks]
    along = [sorted({coordinate[axis] for coordinate in coordinates}) for axis in range(len(mesh.axes))]
    whole = all(len(found) in (1, axis.size) for found, axis in zip(along, mesh.axes, strict=True))
    if not whole or sorted(coordinates) != sorted(product(*along)):
        return f"ranks {', '.join(map(str, ranks))}"
    return axes_named([axis.name for found, axis in zip(along, mesh.axes, strict=True) if len(found) > 1], mesh)
