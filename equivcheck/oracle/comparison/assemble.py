"""Assemble full tensors from all ranks' shards and replicas, and find pieces that contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equivcheck.oracle.comparison.disagreement import DifferingElements, Misfit, disagreements
from equivcheck.oracle.reference.noise import Expected
from equivcheck.worlds.trace.differences import Difference
from equivcheck.worlds.trace.tensors import Flags, Positions, Table, Vector
from equivcheck.worlds.trace.trace import Piece, Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """Full tensors assembled from all ranks' pieces, at one point in a training, such as the gradients in step 2."""

    values: Vector
    """All elements, each from the first rank that holds it. NaN if no rank holds an element."""
    covered: Flags
    """True for each element that some rank holds."""
    misfits: tuple[Misfit, ...]
    """Tensors whose pieces do not fit together. At most one entry for each tensor and kind of difference."""


class Assembler:
    """Assembles full tensors from all ranks' pieces, separately at each point in a training, such as the gradients in step 2.

    A piece has the same position in the full tensor at every step, so positions are cached.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[Positions | None]] = {}
        self._alive: list[object] = []

    def assemble(self, expected: Expected, snapshots: Sequence[Snapshot]) -> Assembled:
        """Assemble the full tensors at one point in a training. `snapshots` holds each rank's recorded values, in rank order."""
        canvas = _Canvas(expected)
        for rank, snapshot in enumerate(snapshots):
            located = self._locate(expected.table, snapshot.pieces)
            canvas.note(_unfit(expected, snapshot, located, rank))
            differing = canvas.place(_where(snapshot, located), snapshot.values.astype(np.float64, copy=False))
            if len(differing.where):
                canvas.note(disagreements(expected, snapshots[: rank + 1], canvas.placed, differing))
        canvas.note(_absent(expected, canvas.covered, canvas.misfits))
        return Assembled(canvas.values, canvas.covered, tuple(canvas.misfits.values()))

    def _locate(self, table: Table, pieces: tuple[Piece, ...]) -> list[Positions | None]:
        key = id(table), id(pieces)
        if key not in self._kept:
            self._alive += [table, pieces]
            self._kept[key] = [table.positions(piece) for piece in pieces]
        return self._kept[key]


class _Canvas:
    def __init__(self, expected: Expected) -> None:
        self.table = expected.table
        self.values = np.full(self.table.total, np.nan)
        self.covered = np.zeros(self.table.total, dtype=np.bool_)
        self.misfits: dict[tuple[str, Difference], Misfit] = {}
        self.placed: list[Positions] = []

    def note(self, misfits: Iterable[Misfit]) -> None:
        """Keep one misfit for each tensor and kind of difference.

        If ranks disagree on values, the misfit farthest from the reference is kept. If several ranks lack the tensor, or have the
        same wrong shape or type, the misfit names all of them.
        """
        for misfit in misfits:
            key = misfit.name, misfit.difference
            kept = self.misfits.setdefault(key, misfit)
            if misfit.distance > kept.distance:
                self.misfits[key] = misfit
            elif misfit.actual == kept.actual:
                self.misfits[key] = replace(kept, ranks=tuple(dict.fromkeys((*kept.ranks, *misfit.ranks))))

    def place(self, where: Positions, local: Vector) -> DifferingElements:
        """Store a rank's local values at the positions `where`. Values stored by earlier ranks stay.

        Return the elements with bits that differ from the stored ones.
        """
        if len(where) and where.min() < 0:
            where, local = where[where >= 0], local[where >= 0]
        self.placed.append(where)
        before, held = self.covered[where], self.values[where]
        differing = before & (held.view(np.int64) != local.view(np.int64))
        self.values[where[~before]] = local[~before]
        self.covered[where] = True
        return DifferingElements(where[differing], held[differing], local[differing])


def _where(snapshot: Snapshot, located: list[Positions | None]) -> Positions:
    parts = [
        np.full(piece.numel, -1) if positions is None else positions
        for piece, positions, present, fits in zip(snapshot.pieces, located, snapshot.present, snapshot.fits, strict=True)
        if present and fits
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.intp)


def _unfit(expected: Expected, snapshot: Snapshot, located: list[Positions | None], rank: int) -> list[Misfit]:
    rows = zip(snapshot.pieces, located, snapshot.present, snapshot.fits, snapshot.dtypes, strict=True)
    found = []
    for piece, positions, present, fits, dtype in rows:
        if not piece.name or _is_empty_part(piece):
            continue
        row = expected.table.rows.get(piece.name)
        if row is None:
            if present:
                found.append(_misfit(piece, Difference.EXTRA, rank, ("no such tensor", f"{dtype}{list(piece.shape)}")))
        elif present != expected.present[row]:
            difference, words = (
                (Difference.EXTRA, ("None", "a tensor")) if present else (Difference.MISSING, ("a tensor", "None"))
            )
            found.append(_misfit(piece, difference, rank, words))
        elif present and not (fits and positions is not None):
            words = str(expected.table.shapes[row]), f"{piece.shape} in a piece of {piece.numel} elements"
            found.append(_misfit(piece, Difference.SHAPE, rank, words))
        elif present and dtype != expected.dtypes[row]:
            found.append(_misfit(piece, Difference.DTYPE, rank, (expected.dtypes[row], dtype)))
    return found


def _is_empty_part(piece: Piece) -> bool:
    # A full tensor without elements has a shape, and counts.
    return not piece.numel and (bool(piece.start) or piece.run is not None)


def _misfit(piece: Piece, difference: Difference, rank: int, words: tuple[str, str]) -> Misfit:
    return Misfit(name=piece.name, difference=difference, rank=rank, ranks=(rank,), expected=words[0], actual=words[1])


def _absent(expected: Expected, covered: Flags, known: dict[tuple[str, Difference], Misfit]) -> list[Misfit]:
    if covered.all():
        return []
    table = expected.table
    ends = [*table.offsets[1:], table.total]
    said = {name for name, difference in known if difference is not Difference.RANKS_DISAGREE}
    return [
        Misfit(
            name=name,
            difference=Difference.MISSING,
            rank=-1,
            expected="a tensor on some rank",
            actual="elements that no rank holds",
        )
        for name, start, end, present in zip(table.names, table.offsets, ends, expected.present, strict=True)
        if present and name not in said and not covered[start:end].all()
    ]
