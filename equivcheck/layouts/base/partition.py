"""Which dims of parameters a layout cuts, and the sizes of the parts: arithmetic on nouns, asking torch for nothing.

Parts are those of `torch.chunk`: equal ones rounded up, the last ones smaller or empty. Where a rank's elements lie, `box_of` of
`equivcheck.training.read` works out by itself, as a second opinion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equivcheck.scenario import Layout, Parallelism, Training
from equivcheck.training.layers.facts import Shape
from equivcheck.training.layers.parameters import Parameter, parameters_of


def chunk_size(size: int, parts: int) -> int:
    """The size of the first part, which is the largest."""
    return -(-size // parts)


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """The size of each part."""
    each = chunk_size(size, parts)
    return tuple(min(max(size - part * each, 0), each) for part in range(parts))


def leaves_nothing(size: int, parts: int) -> bool:
    """Whether the last part is empty."""
    return chunk_size(size, parts) * (parts - 1) >= size


def cut_dim(parallelism: Parallelism, parameter: Parameter) -> int | None:
    """The dim along which a parallelism cuts a parameter; None for one that it leaves whole, as any of no dims."""
    return parallelism.cut_dim(parameter) if parameter.shape else None


def part_of(shape: Shape, dim: int, parts: int, part: int) -> Shape:
    """The shape of one of the parts along a dim."""
    return (*shape[:dim], chunk_sizes(shape[dim], parts)[part], *shape[dim + 1 :])


def local_shape(layout: Layout, parameter: Parameter, coordinates: Mapping[str, int]) -> Shape:
    """The shape of a rank's shard of a parameter, whose `coordinates` are its indices along the axes of the mesh, by name.

    Right for layouts that cut parameters along dims, and for those that cut nothing; what shards of flat parameters hold,
    `equivcheck.layouts.parallelisms.fsdp1.flat_layout` says.
    """
    shape = parameter.shape
    for parallelism in layout.parallelisms:
        dim, axis = cut_dim(parallelism, parameter), layout.axes_of(parallelism)[-1]
        if dim is not None:
            shape = part_of(shape, dim, layout.mesh.size(axis), coordinates[axis])
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A dim of a parameter that DTensor has cut, be it over one rank."""

    size: int
    """Length of the dim."""
    ranks: int
    """Over how many ranks."""


def parameter_cuts(training: Training, layout: Layout, *, least_dims: int = 1) -> Iterator[Cut]:
    """Every cut of every trained parameter of that many dims at least; of matrices, with 2."""
    for parameter in parameters_of(training.model):
        if parameter.trained and len(parameter.shape) >= least_dims:
            for dim, size in enumerate(parameter.shape):
                cutting = [parallelism for parallelism in layout.parallelisms if cut_dim(parallelism, parameter) == dim]
                if cutting:
                    axes = [layout.axes_of(parallelism)[-1] for parallelism in cutting]
                    yield Cut(size=size, ranks=layout.mesh.size(*axes))
