"""Putting full tensors together from what each rank holds, and saying where ranks do not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.oracle.floor import Expected
from equivcheck.oracle.tensors import Positions, Table, Vector
from equivcheck.oracle.verdict import Difference
from equivcheck.train.trace import Piece, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A tensor that could not be compared by value, or on which ranks disagree."""

    name: str
    """Canonical name."""
    difference: Difference
    """In what way."""
    rank: int
    """First rank on which it shows."""
    expected: str
    """What the reference (or another rank) has."""
    actual: str
    """What this rank has."""
    index: tuple[int, ...] = ()
    """Element, where there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """One moment put together from all ranks."""

    values: Vector
    """All elements as the first rank that holds them has them; NaN where no rank does."""
    covered: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Which elements some rank holds."""
    misfits: tuple[Misfit, ...]
    """What does not fit; at most one of a kind for each tensor."""


class Assembler:
    """Puts moments together; keeps where pieces lie, as they lie the same at every step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[Positions | None]] = {}
        self._alive: list[object] = []

    def assemble(self, expected: Expected, snapshots: Sequence[Snapshot]) -> Assembled:
        """The full tensors of one moment from the snapshots of all ranks, in rank order."""
        table = expected.table
        values = np.full(table.total, np.nan)
        covered = np.zeros(table.total, dtype=np.bool_)
        misfits: dict[tuple[str, Difference], Misfit] = {}
        for rank, snapshot in enumerate(snapshots):
            located = self._locate(table, snapshot.pieces)
            for misfit in _unfit(expected, snapshot, located, rank):
                misfits.setdefault((misfit.name, misfit.difference), misfit)
            where = _where(snapshot, located)
            for misfit in _place(table, values, covered, where, snapshot, rank):
                misfits.setdefault((misfit.name, misfit.difference), misfit)
        for misfit in _absent(expected, covered, misfits):
            misfits[misfit.name, misfit.difference] = misfit
        return Assembled(values, covered, tuple(misfits.values()))

    def _locate(self, table: Table, pieces: tuple[Piece, ...]) -> list[Positions | None]:
        key = id(table), id(pieces)
        if key not in self._kept:
            self._alive += [table, pieces]
            self._kept[key] = [table.positions(piece) for piece in pieces]
        return self._kept[key]


def _where(snapshot: Snapshot, located: list[Positions | None]) -> Positions:
    """The position of each of a snapshot's values; -1 for those that belong to no expected tensor."""
    parts = [
        np.full(piece.numel, -1) if positions is None else positions
        for piece, positions, present, fits in zip(snapshot.pieces, located, snapshot.present, snapshot.fits, strict=True)
        if present and fits
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.intp)


def _place(table: Table, values: Vector, covered: np.ndarray, where: Positions, snapshot: Snapshot, rank: int) -> list[Misfit]:  # type: ignore[type-arg]
    local = snapshot.values.astype(np.float64)
    if len(where) and where.min() < 0:
        where, local = where[where >= 0], local[where >= 0]
    before = covered[where]
    held = values[where]
    differing = before & (held.view(np.int64) != local.view(np.int64))
    new = ~before
    values[where[new]] = local[new]
    covered[where] = True
    return _disagreements(table, where[differing], held[differing], local[differing], rank) if differing.any() else []


def _disagreements(table: Table, where: Positions, held: Vector, local: Vector, rank: int) -> list[Misfit]:
    rows = np.searchsorted(table.offsets, where, side="right") - 1
    found = []
    for row in np.unique(rows):
        worst = np.flatnonzero(rows == row)[np.argmax(np.abs(np.nan_to_num(held - local, nan=np.inf))[rows == row])]
        found.append(
            Misfit(
                name=table.names[row],
                difference=Difference.RANKS_DISAGREE,
                rank=rank,
                expected=repr(float(held[worst])),
                actual=repr(float(local[worst])),
                index=element(table, int(where[worst]))[1],
            )
        )
    return found


def _unfit(expected: Expected, snapshot: Snapshot, located: list[Positions | None], rank: int) -> list[Misfit]:
    """Pieces of one rank that should not be there, or are there and should not, or have another shape or element type."""
    found = []
    for piece, positions, present, fits, dtype in zip(
        snapshot.pieces, located, snapshot.present, snapshot.fits, snapshot.dtypes, strict=True
    ):
        if not piece.name or not piece.numel:
            continue
        row = expected.table.rows.get(piece.name)
        difference, want, got = _unfit_piece(expected, row, piece, positions is not None, present, fits, dtype)
        if difference is not None:
            found.append(Misfit(name=piece.name, difference=difference, rank=rank, expected=want, actual=got))
    return found


def _unfit_piece(
    expected: Expected, row: int | None, piece: Piece, located: bool, present: bool, fits: bool, dtype: str
) -> tuple[Difference | None, str, str]:
    if row is None:
        return (Difference.EXTRA, "no such tensor", f"{dtype}{list(piece.shape)}") if present else (None, "", "")
    if present != expected.present[row]:
        return (Difference.EXTRA, "None", "a tensor") if present else (Difference.MISSING, "a tensor", "None")
    if present and not (located and fits):
        return Difference.SHAPE, str(expected.table.shapes[row]), f"{piece.shape} in a piece of {piece.numel} elements"
    if present and dtype != expected.dtypes[row]:
        return Difference.DTYPE, expected.dtypes[row], dtype
    return None, "", ""


def _absent(expected: Expected, covered: np.ndarray, known: dict[tuple[str, Difference], Misfit]) -> list[Misfit]:  # type: ignore[type-arg]
    """Tensors of which no rank holds some element, where that has not been said already."""
    if covered.all():
        return []
    table = expected.table
    ends = [*table.offsets[1:], table.total]
    said = {name for name, difference in known if difference is not Difference.RANKS_DISAGREE}
    return [
        Misfit(name=name, difference=Difference.MISSING, rank=-1, expected="a tensor on some rank", actual="elements that no rank holds")
        for name, start, end, present in zip(table.names, table.offsets, ends, expected.present, strict=True)
        if present and name not in said and not covered[start:end].all()
    ]


def element(table: Table, position: int) -> tuple[int, tuple[int, ...]]:
    """Row of the tensor and index within it of a position in the flat vector."""
    row = int(np.searchsorted(table.offsets, position, side="right")) - 1
    index = np.unravel_index(position - table.offsets[row], table.shapes[row])
    return row, tuple(int(part) for part in index)
