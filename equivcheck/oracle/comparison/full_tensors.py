"""Compare `DTensor.full_tensor` with the tensors assembled from the ranks' shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from equivcheck.oracle.comparison.assemble import Assembled
from equivcheck.oracle.comparison.disagreement import element
from equivcheck.oracle.reference.noise import Expected
from equivcheck.worlds.trace.differences import Difference, Divergence
from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Piece, Snapshot


def full_tensor_divergences(expected: Expected, assembled: Assembled, full: Sequence[Snapshot | None]) -> list[Divergence]:
    """Return the tensors for which `full_tensor()` differs from the assembled shards on some rank.

    Each tensor is reported once, for the first rank with a difference.

    `full` holds a snapshot per rank with the values from `full_tensor()`, or None if the rank did not call it.
    """
    found: dict[str, Divergence] = {}
    for rank, snapshot in enumerate(full):
        for piece, values in _values(snapshot):
            divergence = None if piece.name in found else _compared(expected, assembled, piece, values, rank)
            if divergence is not None:
                found[piece.name] = divergence
    return list(found.values())


def _values(snapshot: Snapshot | None) -> Iterator[tuple[Piece, Vector]]:
    if snapshot is not None:
        ends = np.cumsum([piece.numel for piece in snapshot.pieces])
        parts = np.split(snapshot.values.astype(np.float64), ends[:-1]) if len(ends) else []
        yield from zip(snapshot.pieces, parts, strict=True)


def _compared(expected: Expected, assembled: Assembled, piece: Piece, values: Vector, rank: int) -> Divergence | None:
    table = expected.table
    where = table.positions(piece)
    if where is None:
        shape = "no such tensor" if piece.name not in table.rows else str(table.shapes[table.rows[piece.name]])
        return _divergence(expected, piece.name, rank, (), (shape, str(piece.shape)))
    ours = assembled.values[where]
    distance = np.where((ours == values) | (np.isnan(ours) & np.isnan(values)), 0.0, np.abs(ours - values))
    # Where values are not finite, the tolerance is not either.
    if not distance.any() or np.linalg.norm(distance) <= expected.tolerances[table.rows[piece.name]]:
        return None
    worst = int(np.argmax(np.nan_to_num(distance, nan=np.inf)))
    words = repr(float(ours[worst])), repr(float(values[worst]))
    return _divergence(expected, piece.name, rank, element(table, int(where[worst]))[1], words)


def _divergence(expected: Expected, name: str, rank: int, index: tuple[int, ...], words: tuple[str, str]) -> Divergence:
    return Divergence(
        step=expected.step,
        phase=expected.phase,
        tensor=name,
        difference=Difference.FULL_TENSOR,
        rank=rank,
        index=index,
        expected=words[0],
        actual=words[1],
        error=float("inf"),
    )
