"""Linear sketches: signed sums over a tensor's elements. Shards' sketches add up.

If two sketches are subtracted, the root mean square estimates the distance between the tensors (Alon, Matias, Szegedy: The space
complexity of approximating the frequency moments, 1999). So two runs with other shards are compared, and no rank needs more than
its own elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.recording.signs import NUM_SUMS, Ints, rectangles_of
from equivcheck.recording.tiles import Position, can_be_tile, in_chunks, tiles_of
from equivcheck.worlds.trace.trace import Piece

FORMAT_VERSION = 1
"""Changes whenever the same tensor would get another sketch or hash."""
_SMALL = 2**12
"""Maximum elements in a tensor, if it is summed together with others."""
_MANY = 8
"""Small tensors in the same position are stacked from this number on. Fewer tensors become tiles with others."""
_SLAB = 2**17
"""Elements that are converted to float64 at once: 1 MiB, so that they stay in a core's cache."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketch:
    """32 signed sums and other statistics over some elements in a tensor. The sketches for disjoint parts add up.

    A signed sum multiplies each element by a pseudo-random sign, and adds the products.
    """

    sums: Vector
    """`NUM_SUMS` signed sums over the elements; NaN if an element is NaN or infinite."""
    squares: float
    """Sum of the squared elements."""
    minimum: float
    """Smallest element; inf if there are no elements, NaN if one is NaN."""
    maximum: float
    """Largest element; -inf if there are no elements, NaN if one is NaN."""

    def __add__(self, other: Sketch) -> Sketch:
        return Sketch(
            sums=self.sums + other.sums,
            squares=self.squares + other.squares,
            minimum=_with_nan(min, self.minimum, other.minimum),
            maximum=_with_nan(max, self.maximum, other.maximum),
        )

    def overlaid(self, other: Sketch) -> Sketch:
        """Return the sketch for the elementwise sum of two tensors.

        `squares` is an estimate. The minimum is a lower bound, and the maximum is an upper bound.
        """
        sums = self.sums + other.sums
        squares = float(np.mean(sums**2))
        return Sketch(sums=sums, squares=squares, minimum=self.minimum + other.minimum, maximum=self.maximum + other.maximum)

    def times(self, factor: float) -> Sketch:
        """Return the sketch for the same elements, multiplied by a positive factor."""
        return Sketch(
            sums=self.sums * factor,
            squares=self.squares * factor**2,
            minimum=self.minimum * factor,
            maximum=self.maximum * factor,
        )

    @property
    def norm(self) -> float:
        """2-norm of the elements."""
        return math.sqrt(self.squares)

    def distance(self, other: Sketch) -> float:
        """Estimate the 2-norm of the difference between two tensors.

        It is 0 if they are equal, and rarely wrong by more than a factor of 2.
        """
        difference = self.sums - other.sums
        return math.sqrt(difference.dot(difference) / NUM_SUMS)


def _with_nan(choose: Callable[[float, float], float], one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else choose(one, other)


EMPTY = Sketch(sums=np.zeros(NUM_SUMS), squares=0.0, minimum=math.inf, maximum=-math.inf)
"""Sketch without elements."""


def sketch_parts(parts: Sequence[tuple[Piece, torch.Tensor]]) -> list[Sketch]:
    """Return a sketch of each local tensor: random sums of its values in float64, and their squares and extremes.

    `parts` holds each tensor with its position in the full tensor. All tensors must be on one device, because one copy from the
    device fetches all results.
    """
    order: list[int] = []
    tables = []
    groups, others = _batches(parts)
    for numbers in groups:
        piece, tensors = parts[numbers[0]][0], [parts[at][1] for at in numbers]
        order += numbers
        tables.append(_sketch_small(piece, tensors) if piece.numel <= _SMALL else _sketch_large(piece, tensors[0])[None])
    for numbers in in_chunks(others, [parts[at][0].numel for at in others], _SLAB):
        for chosen, rows in _sketch_tiles([parts[at] for at in numbers]):
            order += [numbers[at] for at in chosen]
            tables.append(rows)
    table = torch.cat(tables).cpu().numpy() if tables else np.zeros((0, NUM_SUMS + 3))
    found = [EMPTY] * len(parts)
    for at, sketch in zip(order, sketches_in(table), strict=True):
        found[at] = sketch
    return found


def sketches_in(table: Vector) -> list[Sketch]:
    """Return a sketch for each row in a table with the columns squares, minimum, maximum and signed sums."""
    return [
        Sketch(sums=row[3:], squares=squares, minimum=minimum, maximum=maximum)
        for row, (squares, minimum, maximum) in zip(table, table[:, :3].tolist(), strict=True)
    ]


def sketch_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Sketch each row along dim 0 as if it were a tensor.

    Returns a float64 table on the tensor's device, with shape (rows, 3 + `NUM_SUMS`): squares, minimum, maximum, signed sums.
    """
    piece, rows = Piece(name="", shape=tuple(tensor.shape[1:])), tensor.unbind()
    if piece.numel > _SMALL:
        return torch.stack([_sketch_large(piece, row) for row in rows])
    length = _SLAB // piece.numel
    return torch.cat([_sketch_small(piece, rows[first : first + length]) for first in range(0, len(rows), length)])


def _batches(parts: Sequence[tuple[Piece, torch.Tensor]]) -> tuple[list[list[int]], list[int]]:
    """Group tensors by number: small tensors in the same position, as in layers of one kind.

    Also return the other small tensors.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for at, (piece, tensor) in enumerate(parts):
        found.setdefault((*_position(piece), tensor.dtype), []).append(at)
    groups, others = [], []
    for numbers in found.values():
        piece = parts[numbers[0]][0]
        if 0 < piece.numel <= _SMALL and len(numbers) < _MANY and can_be_tile(_position(piece)):
            others += numbers
        elif piece.numel:
            length = _SLAB // piece.numel if piece.numel <= _SMALL else 1
            groups += [numbers[first : first + length] for first in range(0, len(numbers), length)]
    return groups, others


def _position(piece: Piece) -> Position:
    return piece.shape, piece.start, piece.size, piece.run


def _sketch_tiles(parts: Sequence[tuple[Piece, torch.Tensor]]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Sketch small tensors in different positions. Yield their numbers, and one row per tensor as in `_sketch_small`."""
    flat = [tensor.detach().reshape(-1) for _, tensor in parts]
    if len({tensor.dtype for tensor in flat}) > 1:
        flat = [tensor.to(torch.float64) for tensor in flat]
    together = torch.cat(flat).to(torch.float64)
    for tiles in tiles_of(tuple(_position(piece) for piece, _ in parts), together.device):
        yield tiles.numbers, tiles.sketch(together)


def _sketch_small(piece: Piece, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one row per tensor: squares, minimum, maximum, signed sums.

    Few torch calls are made, because one call takes longer than a small tensor's sums.
    """
    flat = torch.stack([tensor.detach().reshape(-1) for tensor in tensors]).to(torch.float64)
    sums = []
    for block in _blocks(piece.shape, piece.start, piece.size, piece.run, flat.device):
        num_rows, width = len(block.rows), len(block.columns)
        matrix = flat[:, block.offset : block.offset + num_rows * width].reshape(-1, width)
        products = (matrix @ block.columns.to(torch.float64)).view(len(tensors), num_rows, NUM_SUMS)
        sums.append((products * block.rows).sum(1))
    squares, extremes = torch.linalg.vecdot(flat, flat)[:, None], torch.aminmax(flat, dim=1, keepdim=True)
    return torch.cat([squares, *extremes, sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)], dim=1)


def _sketch_large(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    least, most = torch.aminmax(flat)
    squares, sums = _squares_and_sums(piece, flat)
    return torch.cat([torch.stack([squares, least.to(torch.float64), most.to(torch.float64)]), sums])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Consecutive local elements that form a matrix, with signs for its rows and columns in the full tensor."""

    offset: int
    rows: torch.Tensor
    """Shape (rows, `NUM_SUMS`), int8."""
    columns: torch.Tensor
    """Shape (columns, `NUM_SUMS`), float64; int8 if there are many, to save memory."""


@lru_cache(maxsize=8192)
def _blocks(shape: Ints, start: Ints, size: Ints, run: tuple[int, int] | None, device: torch.device) -> tuple[_Block, ...]:
    return tuple(
        _Block(
            offset=rectangle.offset,
            rows=torch.from_numpy(rectangle.row_signs).to(device),
            columns=torch.from_numpy(rectangle.column_signs).to(
                device, torch.float64 if len(rectangle.columns) <= _SLAB // NUM_SUMS else torch.int8
            ),
        )
        for rectangle in rectangles_of(shape, start, size, run)
    )


def _squares_and_sums(piece: Piece, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return squared sum and signed sums over flat local elements.

    Slabs are converted to float64, so that they stay in the cache.
    """
    squares, sums = [], []
    for block in _blocks(piece.shape, piece.start, piece.size, piece.run, flat.device):
        num_rows, width = len(block.rows), len(block.columns)
        matrix = flat[block.offset : block.offset + num_rows * width].view(num_rows, width)
        height, columns = max(_SLAB // width, 1), block.columns.to(torch.float64)
        for top in range(0, num_rows, height):
            slab = matrix[top : top + height].to(torch.float64)
            squares.append(torch.linalg.vector_norm(slab) ** 2)
            sums.append(((slab @ columns) * block.rows[top : top + height]).sum(0))
    return torch.stack(squares).sum(), torch.stack(sums).sum(0)
