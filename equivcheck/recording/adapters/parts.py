"""Boxes with local elements, and moves into larger tensors: a shard's full tensor, or a fused one that contains a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from equivcheck.errors import UsageError
from equivcheck.worlds.trace.trace import Piece

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Local elements that form a box in the full tensor."""

    piece: Piece
    """Name, and the box's position in the full tensor. `Piece.run` is always None."""
    values: torch.Tensor
    """A view on the local elements, with the box's shape."""

    def transpose(self) -> Part:
        """Return the part with its last two dims swapped, as a part of the transposed tensor.

        Raises `UsageError` if the tensor has fewer than two dims.
        """
        piece = self.piece
        if len(piece.shape) < 2:
            raise UsageError(
                f"the names entry for {piece.name!r} is not valid: shape {piece.shape} cannot be transposed. Expected a tensor "
                "with at least 2 dims."
            )
        turned = replace(
            piece, shape=swap_last_dims(piece.shape), start=swap_last_dims(piece.start), size=swap_last_dims(piece.size)
        )
        return Part(piece=turned, values=self.values.transpose(-1, -2))

    def with_name(self, name: str) -> Part:
        """Return the part with another tensor name.

        If it belongs to optimizer state, such as ``weight/exp_avg``, the key after ``/`` is kept.
        """
        suffix = "".join(self.piece.name.partition("/")[1:])
        return replace(self, piece=replace(self.piece, name=name + suffix))


def swap_last_dims(values: Ints) -> Ints:
    """Swap the last two of a tensor's sizes or indices."""
    return (*values[:-2], values[-1], values[-2])


def parts_of(piece: Piece, values: torch.Tensor) -> Iterator[Part]:
    """Yield a piece's elements as boxes, in the order of the elements. `values` are the piece's elements, in any shape."""
    start, size = piece.start or (0,) * len(piece.shape), piece.size or piece.shape
    offset, length = piece.run or (0, math.prod(size))
    if length == math.prod(size):
        yield Part(piece=replace(piece, start=start, size=size, run=None, place=None), values=values.reshape(size))
        return
    flat, place = values.reshape(-1), 0
    for box_start, box_size in _boxes_of_run(start, size, offset, length):
        count = math.prod(box_size)
        box = replace(piece, start=box_start, size=box_size, run=None, place=None)
        yield Part(piece=box, values=flat[place : place + count].view(box_size))
        place += count


def _boxes_of_run(start: Ints, size: Ints, offset: int, length: int) -> Iterator[tuple[Ints, Ints]]:
    """Split consecutive elements in a box into smaller boxes, given by start and size."""
    if not length:
        return
    if len(size) == 1:
        yield (start[0] + offset,), (length,)
        return
    inner = math.prod(size[1:])
    head = min(-offset % inner, length)
    num_full = (length - head) // inner
    first = offset // inner
    for box_start, box_size in _boxes_of_run(start[1:], size[1:], offset % inner, head):
        yield (start[0] + first, *box_start), (1, *box_size)
    first += bool(head)
    if num_full:
        yield (start[0] + first, *start[1:]), (num_full, *size[1:])
    for box_start, box_size in _boxes_of_run(start[1:], size[1:], 0, length - head - num_full * inner):
        yield (start[0] + first + num_full, *box_start), (1, *box_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Maps a tensor's parts to their positions in a larger tensor.

    The smaller tensor is split along `dim`. The first slice goes to the first box in `boxes`, the second slice to the second box,
    and so on.
    """

    dim: int
    """Dim along which the tensor is split."""
    boxes: tuple[Piece, ...]
    """Positions of the slices in the larger tensor."""

    @property
    def shape(self) -> Ints:
        """Shape that a tensor must have for this move."""
        size = self.boxes[0].size
        return (*size[: self.dim], sum(box.size[self.dim] for box in self.boxes), *size[self.dim + 1 :])

    def __call__(self, part: Part) -> Iterator[Part]:
        """Split a part at the boundaries between the boxes. The part's tensor must have this move's `shape`."""
        assert part.piece.shape == self.shape, "the caller has compared the shapes"
        first, count = part.piece.start[self.dim], part.piece.size[self.dim]
        boundary = 0
        for box in self.boxes:
            low, high = max(first, boundary), min(first + count, boundary + box.size[self.dim])
            if low < high:
                inside = (*part.piece.start[: self.dim], low - boundary, *part.piece.start[self.dim + 1 :])
                size = (*part.piece.size[: self.dim], high - low, *part.piece.size[self.dim + 1 :])
                start = tuple(map(sum, zip(box.start, inside, strict=True)))
                piece = replace(part.piece, shape=box.shape, start=start, size=size)
                yield Part(piece=piece, values=part.values.narrow(self.dim, low - first, high - low))
            boundary += box.size[self.dim]


def shard_move(shape: Ints, dim: int, rank: int, num_ranks: int, num_components: int = 1) -> Move:
    """Return where a shard lies in the full tensor, which is split along `dim` over `num_ranks` ranks.

    `shape` is the shard's shape. A fused dim with `num_components` equal components is split within each component.
    """
    size = (*shape[:dim], shape[dim] // num_components, *shape[dim + 1 :])
    full = (*shape[:dim], shape[dim] * num_ranks, *shape[dim + 1 :])
    starts = [(number * num_ranks + rank) * size[dim] for number in range(num_components)]
    boxes = (
        Piece(name="", shape=full, start=(*(0,) * dim, start, *(0,) * (len(shape) - dim - 1)), size=size) for start in starts
    )
    return Move(dim=dim, boxes=tuple(boxes))
