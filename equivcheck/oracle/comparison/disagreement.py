"""Replicas of an element that ranks hold with other bits: which of them is off the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.oracle.reference.noise import Expected
from equivcheck.worlds.trace.differences import Difference
from equivcheck.worlds.trace.tensors import Positions, Table, Vector
from equivcheck.worlds.trace.trace import Piece, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A tensor that could not be compared by value, or on which ranks disagree."""

    name: str
    """Canonical name."""
    difference: Difference
    """In what way."""
    rank: int
    """First rank on which it shows; of ranks that disagree, the one further off the reference."""
    expected: str
    """What the reference has."""
    actual: str
    """What this rank has."""
    index: tuple[int, ...] = ()
    """Element, where there is one."""
    elsewhere: str = ""
    """What another rank has, where ranks disagree."""
    distance: float = 0.0
    """How far off the reference the element is, where ranks disagree."""


@dataclass(frozen=True, slots=True, eq=False)
class Differing:
    """Elements that a rank holds with other bits than the first rank that has them."""

    where: Positions
    """Positions in the flat vector."""
    held: Vector
    """What the first rank has there."""
    local: Vector
    """What this rank has there."""


def disagreements(
    expected: Expected, snapshots: Sequence[Snapshot], placed: Sequence[Positions], differing: Differing
) -> list[Misfit]:
    """Where the last of some ranks disagrees with those before it; `placed` are the positions that each of them holds.

    Bit for bit where all that both hold lies alike on both; elsewhere, kernels round differently (in a vectorized body or at its
    end) whatever is computed with it, and only what is beyond tolerance counts.
    """
    table, found = expected.table, []
    alike = _lie_alike(table, snapshots)
    rows = np.searchsorted(table.offsets, differing.where, side="right") - 1
    for row in np.unique(rows):
        chosen = rows == row
        distance = _distances(differing.held, differing.local)[chosen]
        if not alike and np.linalg.norm(distance) <= expected.tolerances[row]:
            continue
        worst = int(np.flatnonzero(chosen)[np.argmax(distance)])
        found.append(_misfit(expected, placed, differing, worst, table.names[row]))
    return found


def _misfit(expected: Expected, placed: Sequence[Positions], differing: Differing, worst: int, name: str) -> Misfit:
    """The disagreement on one element, held against the rank that is further off the reference: the last if both are as far."""
    position = int(differing.where[worst])
    values = np.array([differing.local[worst], differing.held[worst]])
    ranks = len(placed) - 1, next(rank for rank, where in enumerate(placed) if position in where)
    distances = _distances(values, expected.values[position])
    blamed = int(np.argmax(distances))
    return Misfit(
        name=name,
        difference=Difference.RANKS_DISAGREE,
        rank=ranks[blamed],
        expected=repr(float(expected.values[position])),
        actual=repr(float(values[blamed])),
        index=element(expected.table, position)[1],
        elsewhere=f"rank {ranks[1 - blamed]} has {float(values[1 - blamed])!r}",
        distance=float(distances[blamed]),
    )


def _distances(values: Vector, others: Vector) -> Vector:
    """How far numbers are from others; infinitely where either is no number."""
    with np.errstate(invalid="ignore"):
        return np.abs(np.nan_to_num(values - others, nan=np.inf))


def _lie_alike(table: Table, snapshots: Sequence[Snapshot]) -> bool:
    """Whether all that the last rank holds has the same place in memory on every rank that holds any of it."""
    *before, last = (frozenset(snapshot.pieces) for snapshot in snapshots)
    held = np.zeros(table.total, dtype=np.bool_)
    for piece in last:
        held[_positions(table, piece)] = True
    return not any(held[_positions(table, piece)].any() for pieces in before for piece in pieces - last)


def _positions(table: Table, piece: Piece) -> Positions:
    found = table.positions(piece)
    return np.empty(0, dtype=np.intp) if found is None else found


def element(table: Table, position: int) -> tuple[int, tuple[int, ...]]:
    """Row of the tensor and index within it of a position in the flat vector."""
    row = int(np.searchsorted(table.offsets, position, side="right")) - 1
    index = np.unravel_index(position - table.offsets[row], table.shapes[row])
    return row, tuple(int(part) for part in index)
