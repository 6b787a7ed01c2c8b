"""Sharded dims and shard sizes: arithmetic without torch.

Shards are like those from `torch.chunk`: equal sizes rounded up, the last ones smaller or empty. `box_of` in
`equivcheck.training.read` computes a rank's elements independently, as a second opinion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equivcheck.scenario import Layout, Parallelism, Training
from equivcheck.training.layers.facts import Shape
from equivcheck.training.layers.parameters import Parameter, parameters_of


def chunk_size(size: int, parts: int) -> int:
    """Return the size of the first shard if `torch.chunk` splits `size` into `parts`. It is the largest shard."""
    return -(-size // parts)


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return each shard's size if `torch.chunk` splits `size` into `parts`.

    If torch returns fewer chunks, the other shards have size 0.
    """
    each = chunk_size(size, parts)
    return tuple(min(max(size - part * each, 0), each) for part in range(parts))


def is_last_shard_empty(size: int, parts: int) -> bool:
    """Whether the last shard is empty if `torch.chunk` splits `size` into `parts`."""
    return chunk_size(size, parts) * (parts - 1) >= size


def shard_dim(parallelism: Parallelism, parameter: Parameter) -> int | None:
    """Dim along which a parallelism shards a parameter. None if the parameter is replicated or a scalar."""
    return parallelism.shard_dim(parameter) if parameter.shape else None


def axes_of_shards(layout: Layout, parallelism: Parallelism, parameter: Parameter) -> tuple[str, ...]:
    """Mesh axes whose ranks have different shards of a parameter, if the parallelism shards the parameter."""
    axes = parallelism.axes_of_shards(parameter, layout.axes_of(parallelism))
    return tuple(axis for axis in layout.mesh.names if axis in axes)


def shard_shape(shape: Shape, dim: int, parts: int, part: int) -> Shape:
    """Return the shape of shard number `part` if `torch.chunk` splits a dim into `parts`."""
    return (*shape[:dim], chunk_sizes(shape[dim], parts)[part], *shape[dim + 1 :])


def local_shape(layout: Layout, parameter: Parameter, coordinates: Mapping[str, int]) -> Shape:
    """Return the shape of a parameter's local tensor on a rank, if the parameter is replicated or sharded along dims.

    `coordinates` maps mesh axes to the rank's indices. For flat parameters see
    `equivcheck.layouts.parallelisms.fsdp1.flat_layout`.
    """
    shape = parameter.shape
    for parallelism in layout.parallelisms:
        dim, axes = shard_dim(parallelism, parameter), axes_of_shards(layout, parallelism, parameter)
        if dim is not None:
            part = 0
            for axis in axes:
                part = part * layout.mesh.size(axis) + coordinates[axis]
            shape = shard_shape(shape, dim, layout.mesh.size(*axes), part)
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedDim:
    """A dim along which a DTensor parameter is sharded, perhaps over a single rank."""

    size: int
    """Length before sharding."""
    ranks: int
    """Number of shards, one for each rank."""


def trained_shardings(training: Training, layout: Layout, *, least_dims: int = 1) -> Iterator[ShardedDim]:
    """Yield all sharded dims in trained parameters. Parameters with fewer than `least_dims` dims are left out."""
    for parameter in parameters_of(training.model):
        if parameter.trained and len(parameter.shape) >= least_dims:
            for dim, size in enumerate(parameter.shape):
                cutting = [parallelism for parallelism in layout.parallelisms if shard_dim(parallelism, parameter) == dim]
                if cutting:
                    axes = [axis for parallelism in cutting for axis in axes_of_shards(layout, parallelism, parameter)]
                    yield ShardedDim(size=size, ranks=layout.mesh.size(*axes))
