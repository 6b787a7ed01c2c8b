"""Sums small tensors of different shapes together: each becomes a tile with zeros around its elements.

One matrix product then sums all tiles of one size. For a single small tensor, a call of torch takes longer than the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.recording.signs import NUM_SUMS, Ints, Rectangle, column_signs, rectangles_of, row_signs

MAX_PADDING = 4
"""Maximum ratio between a tile's cells and its tensor's elements."""
Position = tuple[Ints, Ints, Ints, tuple[int, int] | None]
"""Fields of a `Piece`: shape, start, size and run."""
Cells = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Several small tensors, padded to matrices with the same size. One matrix product computes the signed sums for all of them.

    The tensors are stored one after the other in a flat tensor.
    """

    numbers: tuple[int, ...]
    """For each tile, its tensor's index among all tensors."""
    index: torch.Tensor
    """For each tile and cell, the element's index in the flat tensor, with shape (tiles, cells). A padding cell has the index of
    any element in its tile.
    """
    is_padding: torch.Tensor
    """Whether each cell is padding, with shape (tiles, cells)."""
    rows: torch.Tensor
    """Signs of the rows, with shape (tiles, rows, `NUM_SUMS`); 0 in padding."""
    columns: torch.Tensor
    """Signs of the columns, in float64 with shape (columns, `NUM_SUMS`)."""

    def sketch(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a row for each tile: squares, minimum, maximum, signed sums. `flat` holds all tensors' elements in float64."""
        cells = flat.index_select(0, self.index.view(-1)).view(self.index.shape)
        extremes = torch.aminmax(cells, dim=1, keepdim=True)
        cells.masked_fill_(self.is_padding, 0.0)
        products = (cells.view(-1, len(self.columns)) @ self.columns).view(self.rows.shape)
        return torch.cat([torch.linalg.vecdot(cells, cells)[:, None], *extremes, (products * self.rows).sum(1)], dim=1)


@lru_cache(maxsize=64)  # each step reads the same tensors again
def tiles_of(positions: tuple[Position, ...], device: torch.device) -> tuple[Tiles, ...]:
    """Arrange tensors in tiles. `positions` are the tensors' positions in their full tensors."""
    sizes: dict[tuple[int, int], list[tuple[int, int, list[Rectangle]]]] = {}
    first = 0
    for number, position in enumerate(positions):
        rectangles = list(rectangles_of(*position))
        sizes.setdefault(_size(rectangles), []).append((number, first, rectangles))
        first += sum(len(each.rows) * len(each.columns) for each in rectangles)
    return tuple(_make(size, found, device) for size, found in sizes.items())


@lru_cache(maxsize=8192)
def can_be_tile(position: Position) -> bool:
    """Whether a tile for the tensor at `position` needs little padding."""
    rectangles = rectangles_of(*position)
    rows, columns = _size(rectangles)
    return rows * columns <= MAX_PADDING * sum(len(each.rows) * len(each.columns) for each in rectangles)


def _size(rectangles: Sequence[Rectangle]) -> tuple[int, int]:
    """Return how many rows and columns a tile has, rounded up to powers of two so that most tensors share a size."""
    rows, columns = (sum(len(each.rows) for each in rectangles), max(int(each.columns.max()) + 1 for each in rectangles))
    return 1 << (rows - 1).bit_length(), 1 << (columns - 1).bit_length()


def _make(size: tuple[int, int], found: Sequence[tuple[int, int, list[Rectangle]]], device: torch.device) -> Tiles:
    index = np.stack([_cells(size, first, rectangles) for _, first, rectangles in found])
    is_padding = index < 0
    firsts = np.array([first for _, first, _ in found])
    rows = np.zeros((len(found), size[0], NUM_SUMS), dtype=np.int8)
    for number, (_, _, rectangles) in enumerate(found):
        indices = np.concatenate([each.rows for each in rectangles])
        rows[number, : len(indices)] = row_signs(indices)
    return Tiles(
        numbers=tuple(number for number, _, _ in found),
        index=torch.from_numpy(np.where(is_padding, firsts[:, None], index).astype(np.int32)).to(device),
        is_padding=torch.from_numpy(is_padding).to(device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(column_signs(np.arange(size[1]))).to(device, torch.float64),
    )


def _cells(size: tuple[int, int], first: int, rectangles: Sequence[Rectangle]) -> Cells:
    """Return each cell's element index, or -1. Each rectangle's rows start below those before it."""
    cells = np.full(size, -1, dtype=np.int64)
    top = 0
    for each in rectangles:
        own = np.arange(len(each.rows) * len(each.columns)).reshape(len(each.rows), -1) + first + each.offset
        cells[top : top + len(each.rows), each.columns] = own
        top += len(each.rows)
    return cells.reshape(-1)


def in_chunks(numbers: Sequence[int], numels: Sequence[int], length: int) -> Iterator[list[int]]:
    """Yield `numbers` in chunks, so that the tensors in a chunk have at most `length` elements together.

    A longer tensor gets its own chunk. `numels` are the element counts.
    """
    chunk: list[int] = []
    total = 0
    for number, numel in zip(numbers, numels, strict=True):
        if chunk and total + numel > length:
            yield chunk
            chunk, total = [], 0
        chunk.append(number)
        total += numel
    if chunk:
        yield chunk
