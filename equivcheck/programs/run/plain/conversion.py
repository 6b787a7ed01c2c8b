"""Changes of placement on a mesh, axis by axis, with one collective per axis if possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equivcheck.programs.nouns.placement import REPLICATE, reduction_of, sharded_dim
from equivcheck.programs.run.plain.collectives import Collectives, lengths

Placements = tuple[str, ...]


def convert(
    local: torch.Tensor, shape: Sequence[int], current: Placements, wanted: Placements, axes: Sequence[Collectives]
) -> torch.Tensor:
    """Change a plain tensor's placements, and return this rank's part. `shape` is the full shape.

    Axes are converted one after the other. If several axes shard one dim, the inner axes gather it before an outer axis changes,
    and shard it again afterwards.
    """
    placements, between = list(current), _between(current, wanted)
    for number in reversed(range(len(axes))):
        local = _along(local, _extents(shape, placements, axes, number), placements[number], between[number], axes[number])
        placements[number] = between[number]
    for number in range(len(axes)):
        local = _along(local, _extents(shape, placements, axes, number), placements[number], wanted[number], axes[number])
        placements[number] = wanted[number]
    return local


def _between(current: Placements, wanted: Placements) -> Placements:
    """Return the placements between two conversions: `wanted` if one axis changes, else replicated on every axis that changes."""
    changed = [number for number, (old, new) in enumerate(zip(current, wanted, strict=True)) if old != new]
    dims = {dim for number in changed for each in (current[number], wanted[number]) if (dim := sharded_dim(each)) is not None}
    undone = {number for number, each in enumerate(current) if number in changed or sharded_dim(each) in dims}
    if len(undone) <= 1:
        return wanted
    return tuple(REPLICATE if number in undone else each for number, each in enumerate(current))


def _extents(shape: Sequence[int], placements: Sequence[str], axes: Sequence[Collectives], number: int) -> list[int]:
    """Return the shape shared by the ranks along an axis.

    Outer axes have sharded the tensor already; inner axes shard other dims.
    """
    found = list(shape)
    for each, axis in zip(placements[:number], axes, strict=False):
        dim = sharded_dim(each)
        if dim is not None:
            found[dim] = lengths(found[dim], axis.size)[axis.index]
    return found


def _along(local: torch.Tensor, extents: Sequence[int], current: str, wanted: str, axis: Collectives) -> torch.Tensor:
    """Change the placement along one axis. Raises `NotImplementedError` for partial maxima and minima."""
    if current == wanted:
        return local
    local = _sum(local, current, axis)
    source, target = sharded_dim(current), sharded_dim(wanted)
    if reduction_of(current):
        local = (
            local if reduction_of(wanted) else axis.all_reduce(local) if target is None else axis.reduce_scatter(local, target)
        )
    elif source is not None:
        if reduction_of(wanted):
            local = axis.shard_to_partial(local, source, extents[source])
        elif target is None:
            local = axis.all_gather(local, source, extents[source])
        else:
            local = axis.all_to_all(local, source, extents[source], target)
    elif reduction_of(wanted):
        local = axis.to_partial(local)
    else:
        assert target is not None
        local = axis.shard(local, target)
    return local * axis.size if reduction_of(wanted) == "avg" else local


def _sum(local: torch.Tensor, current: str, axis: Collectives) -> torch.Tensor:
    """Convert partial averages to partial sums."""
    if reduction_of(current) not in (None, "sum", "avg"):
        raise NotImplementedError(
            f"{current} is not supported on plain tensors: only partial sums and averages can be differentiated"
        )
    return local / axis.size if reduction_of(current) == "avg" else local
