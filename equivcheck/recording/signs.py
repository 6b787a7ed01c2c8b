"""Pseudo-random signs and weights for a tensor's elements. They depend only on an element's index in the full tensor.

An element has a row and a column: flat indices over the leading and over the remaining dims. Row and column have separate hashes,
and the element's sign or weight is their product. So one table for rows and one for columns are enough, and one matrix product
sums a shard, whatever its shape. The hash is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivcheck.worlds.trace.trace import Piece

NUM_SUMS = 32
"""Signed sums per tensor: one for each upper bit in a 64-bit hash. The trace format depends on it."""
VECTOR_WIDTH = 256
"""Tensors with at most this many elements have one row; larger vectors have rows this long. The trace format depends on it."""
_ROW_SALT, _COLUMN_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344
"""First digits in pi, so that rows and columns have unrelated hashes."""

Indices = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Signs = npt.NDArray[np.int8]
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rectangle:
    """Consecutive elements of a local tensor, arranged as a matrix. Row and column indices are those in the full tensor."""

    rows: Indices
    """For each row, its flat index over the full tensor's leading dims."""
    columns: Indices
    """For each column, its flat index over the full tensor's remaining dims."""
    offset: int
    """The first element's position among the local elements."""

    @property
    def row_signs(self) -> Signs:
        """For each row, its sign in each signed sum (see `Sketch`), with shape (rows, `NUM_SUMS`)."""
        return row_signs(self.rows)

    @property
    def column_signs(self) -> Signs:
        """For each column, its sign in each signed sum (see `Sketch`), with shape (columns, `NUM_SUMS`)."""
        return column_signs(self.columns)


def hash_rows(rows: Indices) -> Hashes:
    """Return a 64-bit hash for each row index."""
    return splitmix64(rows.astype(np.uint64) ^ np.uint64(_ROW_SALT))


def hash_columns(columns: Indices) -> Hashes:
    """Return a 64-bit hash for each column index. It differs from the hash for a row with the same index."""
    return splitmix64(columns.astype(np.uint64) ^ np.uint64(_COLUMN_SALT))


def splitmix64(values: Hashes) -> Hashes:
    """Return SplitMix64's pseudo-random output for each generator state in `values`."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def row_signs(rows: Indices) -> Signs:
    """Return each row's sign in each signed sum (see `Sketch`), with shape (rows, `NUM_SUMS`)."""
    return _signs(hash_rows(rows))


def column_signs(columns: Indices) -> Signs:
    """Return each column's sign in each signed sum (see `Sketch`), with shape (columns, `NUM_SUMS`)."""
    return _signs(hash_columns(columns))


def _signs(hashes: Hashes) -> Signs:
    upper = (hashes >> np.uint64(32)).astype("<u4")
    bits = np.unpackbits(upper.view(np.uint8).reshape(len(hashes), 4), axis=1, bitorder="little")
    signs: Signs = 1 - 2 * bits.astype(np.int8)
    return signs


def rectangles_of(shape: Ints, start: Ints = (), size: Ints = (), run: tuple[int, int] | None = None) -> tuple[Rectangle, ...]:
    """Split a local tensor's elements into matrices, in their order in memory.

    A box with several dims is one matrix. Other consecutive elements become at most three: a row's end, full rows, and a row's
    beginning. `shape` is the full tensor's shape. The other arguments are a `Piece`'s fields.
    """
    start, size = (start, size) if start else ((0,) * len(shape), shape)
    if math.prod(shape) <= VECTOR_WIDTH:
        # One row, so that each element has a sign of its own: products of few signs would miss some differences.
        columns = _flat_indices(shape, start, size)
        offset, length = (0, len(columns)) if run is None else run
        return _split_run(np.zeros(1, dtype=np.int64), columns[offset : offset + length], 0, length)
    if len(shape) == 1:
        # A vector is a matrix with `VECTOR_WIDTH` columns, so each box in it is a run.
        offset, length = (0, size[0]) if run is None else run
        rows, columns = np.arange(-(-(start[0] + size[0]) // VECTOR_WIDTH)), np.arange(VECTOR_WIDTH)
        return _split_run(rows, columns, start[0] + offset, length)
    split = split_dim(shape)
    rows, columns = (_flat_indices(shape[dims], start[dims], size[dims]) for dims in (slice(split), slice(split, None)))
    offset, length = (0, len(rows) * len(columns)) if run is None else run
    return _split_run(rows, columns, offset, length)


def split_dim(shape: Ints) -> int:
    """Return how many leading dims of a tensor with this shape form the rows.

    This number minimizes the size of the tables with signs for rows and columns.
    """
    return min(range(1, len(shape)), key=lambda dim: math.prod(shape[:dim]) + math.prod(shape[dim:]))


def _flat_indices(shape: Ints, start: Ints, size: Ints) -> Indices:
    """Return a box's flat indices within these dims, in row-major order."""
    found = np.zeros(1, dtype=np.int64)
    for full, first, count in zip(shape, start, size, strict=True):
        found = (found[:, None] * full + np.arange(first, first + count)).reshape(-1)
    return found


def _split_run(rows: Indices, columns: Indices, offset: int, length: int) -> tuple[Rectangle, ...]:
    """Split a matrix's consecutive elements: a row's end, full rows, and a row's beginning."""
    if not length:
        return ()
    width = len(columns)
    head = min(-offset % width, length)
    num_full = (length - head) // width
    tail, full = length - head - num_full * width, -(-offset // width)
    parts = (
        (rows[offset // width :][:1], columns[offset % width :][:head]),
        (rows[full : full + num_full], columns),
        (rows[full + num_full :][:1], columns[:tail]),
    )
    found, place = [], 0
    for own_rows, own_columns in parts:
        if len(own_rows) * len(own_columns):
            found.append(Rectangle(rows=own_rows, columns=own_columns, offset=place))
            place += len(own_rows) * len(own_columns)
    return tuple(found)


def signs_of(piece: Piece, number: int) -> Signs:
    """Return the signs that a piece's elements have in signed sum `number`, in local order."""
    rectangles = rectangles_of(piece.shape, piece.start, piece.size, piece.run)
    found = [np.outer(each.row_signs[:, number], each.column_signs[:, number]).reshape(-1) for each in rectangles]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int8)
