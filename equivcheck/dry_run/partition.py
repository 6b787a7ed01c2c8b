"""How many elements of each parameter a rank should hold: plain arithmetic on the nouns, asking torch for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from equivcheck.layouts.cuts import is_sharded_by_rows
from equivcheck.scenario import FSDP2, Layout, Parallelism, Split, TensorParallel
from equivcheck.scenario.mesh import DP, SHARD, TP

Shape = tuple[int, ...]


def local_shape(layout: Layout, name: str, shape: Shape, coordinates: Mapping[str, int]) -> Shape:
    """The shape of a rank's shard of a parameter, whose `coordinates` are its places along the axes of the mesh.

    Right for layouts that cut tensors along dims, and for those that cut nothing; what shards of flat
    parameters hold, `equivcheck.layouts.flat_layout` says.
    """
    for parallelism in layout.parallelisms:
        dim = _cut_dim(parallelism, name)
        if dim is not None:
            axes = (TP,) if isinstance(parallelism, TensorParallel) else (DP, SHARD)
            axis = next((axis for axis in layout.mesh.axes if axis.name in axes), None)
            if axis is not None:
                shape = _cut(shape, dim, axis.size, coordinates[axis.name])
    return shape


def _cut_dim(parallelism: Parallelism, name: str) -> int | None:
    """The dim along which a parallelism cuts a parameter; None for one that it leaves whole."""
    if isinstance(parallelism, TensorParallel):
        return _plan_dim(parallelism, name)
    return 0 if isinstance(parallelism, FSDP2) or is_sharded_by_rows(parallelism) else None


def _plan_dim(parallelism: TensorParallel, name: str) -> int | None:
    _, index, module, attribute = name.split(".")
    split = parallelism.plan[int(index)].split
    if module == "norm" or split not in (Split.COLUMN, Split.ROW):
        return None
    if split is Split.COLUMN:
        return 0
    return 1 if attribute == "weight" else None


def _cut(shape: Shape, dim: int, parts: int, part: int) -> Shape:
    """The part of a shape that `torch.chunk` would give: equal parts rounded up, the last ones smaller or empty."""
    each = -(-shape[dim] // parts)
    size = min(max(shape[dim] - part * each, 0), each)
    return (*shape[:dim], size, *shape[dim + 1 :])
