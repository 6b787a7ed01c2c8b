"""Tensors compared at one point of a training, concatenated to one flat vector."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivcheck.worlds.trace.trace import Piece

Vector = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.floating]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Names, shapes and positions of all tensors compared at one point of a training, concatenated to one flat vector."""

    names: tuple[str, ...]
    """Canonical names of the tensors, all different, in the single-device run's order."""
    shapes: tuple[tuple[int, ...], ...]
    """Full shapes."""
    offsets: tuple[int, ...]
    """Index of each tensor's first element in the flat vector."""
    total: int
    """Length of the flat vector."""
    rows: dict[str, int]
    """Index of each tensor in `names`."""
    filled: Flags
    """For each tensor, whether it has elements."""
    starts: Positions
    """Index of the first element in the flat vector, for each tensor with elements."""

    def positions(self, piece: Piece) -> Positions | None:
        """Return where the elements of a rank's piece lie in the flat vector.

        None if the table has no tensor with this name and shape.
        """
        row = self.rows.get(piece.name)
        if row is None or self.shapes[row] != piece.shape:
            return None
        everything = np.arange(self.offsets[row], self.offsets[row] + math.prod(piece.shape))
        if piece.start:
            box = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True))
            everything = everything.reshape(piece.shape)[box].ravel()
        if piece.run is None:
            return everything
        offset, length = piece.run
        return everything[offset : offset + length]


def table_of(pieces: tuple[Piece, ...]) -> Table:
    """Build the table for the pieces of a single-device run, which are full tensors."""
    sizes = [math.prod(piece.shape) for piece in pieces]
    offsets = [0, *np.cumsum(sizes).tolist()]
    return Table(
        names=tuple(piece.name for piece in pieces),
        shapes=tuple(piece.shape for piece in pieces),
        offsets=tuple(offsets[:-1]),
        total=offsets[-1],
        rows={piece.name: row for row, piece in enumerate(pieces)},
        filled=np.array(sizes, dtype=np.intp) > 0,
        starts=np.array([offset for offset, size in zip(offsets, sizes, strict=False) if size], dtype=np.intp),
    )


def full_vector(table: Table, present: tuple[bool, ...], values: Numbers) -> Vector:
    """Return `values` with zeros inserted for tensors that are not `present`.

    `values` is one flat vector, or several stacked along dim 0.
    """
    if all(present):
        return values.astype(np.float64, copy=False)
    full = np.zeros((*values.shape[:-1], table.total))
    ends = [*table.offsets[1:], table.total]
    kept = [np.arange(start, end) for start, end, there in zip(table.offsets, ends, present, strict=True) if there]
    if kept:
        full[..., np.concatenate(kept)] = values
    return full


def norms(table: Table, vector: Vector) -> Vector:
    """Return the Frobenius norm of each tensor in one flat vector, or in each of several vectors stacked along dim 0."""
    found = np.zeros((*vector.shape[:-1], len(table.names)))
    if len(table.starts):  # reduceat gives an empty tensor the first element of the next one
        with np.errstate(over="ignore", invalid="ignore"):
            found[..., table.filled] = np.sqrt(np.add.reduceat(np.square(vector), table.starts, axis=-1))
    return found
