"""Finds the positions of plain shards in full parameters, from the user's `cuts`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard

from equivcheck.training.read import Mesh, box_of
from equivcheck.user.usage import invalid
from equivcheck.worlds.trace.trace import Piece

Components = int | Sequence[int]
"""Components of a fused dim: the number of components of equal size, or the size of each component."""
Cut = tuple[int, str] | tuple[int, str, Components]
"""Tensor dim and mesh axis, and the dim's components if the axis splits each of them."""
Cuts = Mapping[str, Sequence[Cut]]
"""Maps parameter names, or `fnmatch` patterns, to cuts."""


def require_cuts(cuts: Any, axes: Sequence[str]) -> dict[str, tuple[Cut, ...]] | None:
    """Check the argument `cuts`. Raises `UsageError` if an entry has a wrong form or repeats an axis."""
    if cuts is None:
        return None
    expected = f"a dict such as {{'0.weight': ((0, {axes[-1]!r}),)}}, with each axis from {', '.join(axes)} at most once per name"
    if not isinstance(cuts, Mapping):
        raise invalid(f"cuts {cuts!r:.100}", "it is not a dict", expected)
    for name, entries in cuts.items():
        if not (isinstance(name, str) and _are_cuts(entries, axes)):
            why = "it is not a name with pairs of dim and axis, or triples of dim, axis and components"
            raise invalid(f"cuts[{name!r}]: {entries!r:.100}", why, expected)
    return {name: tuple(tuple(entry) for entry in entries) for name, entries in cuts.items()}


def _are_cuts(entries: Any, axes: Sequence[str]) -> bool:
    if not (isinstance(entries, (tuple, list)) and all(isinstance(each, (tuple, list)) for each in entries)):
        return False
    if any(len(entry) not in (2, 3) for entry in entries):
        return False
    named = [entry[1] for entry in entries]
    return (
        all(_is_int(entry[0]) and all(map(_are_components, entry[2:])) for entry in entries)
        and set(named) <= set(axes)
        and len(set(named)) == len(named)
    )


def _are_components(value: Any) -> bool:
    sizes = value if isinstance(value, (tuple, list)) else [value]
    return bool(sizes) and all(_is_int(size) and size > 0 for size in sizes)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class ShardBoxes:
    """Positions of this rank's shards in the full parameters, according to `cuts`.

    A shard of a fused parameter has one box for each component, such as query, key and value. Shards are chunks as
    `torch.chunk` makes them, split along outer axes first.
    """

    def __init__(self, cuts: Cuts, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> None:
        """`shapes` are the full parameters' shapes. Raises `UsageError` if a name, dim or component does not exist."""
        for pattern in cuts:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                raise invalid(f"cuts[{pattern!r}]", "no parameter has this name", f"one of {', '.join(shapes)}, or a pattern")
        self._boxes: dict[str, tuple[int, tuple[Piece, ...]]] = {}
        for name, shape in shapes.items():
            entries = next((entries for pattern, entries in cuts.items() if fnmatchcase(name, pattern)), ())
            if entries:
                placements = _placements(name, shape, entries, mesh)
                dim, sizes = _components(name, shape, entries)
                boxes = [box_of(name, _with(shape, dim, size), mesh, placements) for size in sizes]
                starts = [sum(sizes[:number]) for number in range(len(sizes))]
                self._boxes[name] = dim, tuple(_in_full(*each, shape, dim) for each in zip(boxes, starts, strict=True))

    def boxes_of(self, name: str) -> tuple[int, tuple[Piece, ...]]:
        """Return this rank's boxes in the full parameter `name`, and the dim along which the local shard concatenates them.

        The parameter must be in `cuts`.
        """
        return self._boxes[name]

    def place(self, piece: Piece) -> tuple[Piece, ...]:
        """Return the positions in the full tensor for `piece`, a piece of a local parameter or its optimizer state.

        In a fused parameter, elements that are consecutive locally may lie in several boxes. A piece is returned for each of
        these boxes. Raises `UsageError` if the local shape does not fit.
        """
        if piece.name.partition("/")[0] not in self._boxes:
            return (piece,)
        dim, boxes = self._boxes[piece.name.partition("/")[0]]
        local = _with(boxes[0].size, dim, sum(box.size[dim] for box in boxes))
        if piece.shape != local:
            raise invalid(
                f"the cuts entry for {piece.name!r}",
                f"the cuts give this rank the shape {local} of the full shape {boxes[0].shape}, but its tensor has {piece.shape}",
                "shards as torch.chunk makes them, or full_tensors=fn(module)",
            )
        if len(boxes) == 1:
            start = tuple(map(sum, zip(boxes[0].start, piece.start or (0,) * len(local), strict=True)))
            return (replace(piece, shape=boxes[0].shape, start=start, size=piece.size or piece.shape),)
        empty = replace(piece, shape=boxes[0].shape, start=boxes[0].start, size=(0,) * len(local), run=None)
        return tuple(_pieces_in(piece, boxes, dim)) or (empty,)


def _pieces_in(piece: Piece, boxes: Sequence[Piece], dim: int) -> Iterator[Piece]:
    """Split a piece of a local tensor at the components' boundaries, in the order of its elements."""
    starts, sizes = piece.start or (0,) * len(piece.shape), piece.size or piece.shape
    offset, length = piece.run or (0, piece.numel)
    passed = 0
    for leading in product(*map(range, sizes[:dim])):
        boundary = 0
        for box in boxes:
            low, high = max(starts[dim], boundary), min(starts[dim] + sizes[dim], boundary + box.size[dim])
            if low < high:
                at = (*(first + index for first, index in zip(starts, leading, strict=False)), low - boundary, *starts[dim + 1 :])
                extent = (*(1,) * dim, high - low, *sizes[dim + 1 :])
                first, last = max(offset - passed, 0), min(offset + length - passed, math.prod(extent))
                if first < last:
                    start = tuple(map(sum, zip(box.start, at, strict=True)))
                    run = None if last - first == math.prod(extent) else (first, last - first)
                    yield replace(piece, shape=box.shape, start=start, size=extent, run=run)
                passed += math.prod(extent)
            boundary += box.size[dim]


def _in_full(box: Piece, offset: int, shape: tuple[int, ...], dim: int) -> Piece:
    """Move a box from a component to the full tensor."""
    return replace(box, shape=shape, start=_with(box.start, dim, box.start[dim] + offset))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _components(name: str, shape: tuple[int, ...], entries: Sequence[Cut]) -> tuple[int, list[int]]:
    """Return the fused dim and its components' sizes; without components, one dim as one component."""
    known = [(entry[0] % len(shape), *entry[2:]) for entry in entries]
    dim, *components = next((each for each in known if len(each) > 1), known[0])
    if not components:
        return dim, [shape[dim]]
    if any(each != (dim, *components) for each in known if len(each) > 1 or each[0] == dim):
        raise invalid(
            f"cuts[{name!r}]",
            f"its entries for dim {dim} give different components",
            "the same components in each of these entries",
        )
    (parts,) = components
    sizes = [shape[dim] // parts] * parts if isinstance(parts, int) else list(parts)
    if sum(sizes) != shape[dim]:
        why = f"dim {dim} of shape {shape} has {shape[dim]} elements"
        raise invalid(
            f"cuts[{name!r}] with components {parts!r}",
            why,
            f"a number of components that divides {shape[dim]}, or component sizes with the sum {shape[dim]}",
        )
    return dim, sizes


def _placements(name: str, shape: tuple[int, ...], entries: Sequence[Cut], mesh: Mesh) -> list[Placement]:
    found: dict[str, Placement] = {}
    for dim, axis, *_ in entries:
        if not -len(shape) <= dim < len(shape):
            expected = f"a dim from {-len(shape)} to {len(shape) - 1}" if shape else "no entry, because the parameter has no dims"
            raise invalid(f"cuts[{name!r}]", f"shape {shape} has no dim {dim}", expected)
        found[axis] = Shard(dim % len(shape))
    return [found.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ()]
