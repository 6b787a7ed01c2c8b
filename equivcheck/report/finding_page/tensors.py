"""Draws differing tensors as cells, for each rank. Held elements and wrong elements are marked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.oracle.verdict.sentences import place, ranks_with_value
from equivcheck.report.finding_page.second_run import Compared, SecondRun
from equivcheck.scenario import Mesh, Scenario
from equivcheck.scenario.scenario import count
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.pieces import values_by_piece
from equivcheck.worlds.trace.tensors import Flags, Vector
from equivcheck.worlds.trace.trace import Piece

MAX_TENSORS = 6
"""Maximum number of tensors to draw, beginning with the first difference."""
_MAX_SIDE = 16
"""Maximum number of cells per side. In a larger tensor, one cell represents a block of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One rank's elements in a tensor, as a drawing."""

    rank: int
    """Global rank."""
    where: str
    """The rank's mesh coordinates, as text."""
    words: str
    """How many elements the rank holds, and how many are wrong, as text."""
    held: str
    """Cells with held elements, as an SVG path."""
    wrong: str
    """Cells with wrong elements, as an SVG path."""
    crosses: str
    """A line through each wrong cell, for readers who do not see colors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTensor:
    """A tensor that differs from the single-device run, drawn for all ranks."""

    name: str
    """Step, phase and tensor."""
    shape: str
    """The full shape, and how many elements a cell stands for."""
    words: str
    """The worst element, with its values on one device and on ranks."""
    columns: int
    """How many cells are in a row."""
    rows: int
    """How many cells are in a column."""
    blocks: tuple[Block, ...]
    """A drawing for each rank."""


def drawn_tensors(again: SecondRun, scenario: Scenario) -> tuple[DrawnTensor, ...]:
    """Draw the tensors with the first differences. Losses are left out, because no rank holds a part of them."""
    chosen = [found for found in again.divergences if found.phase is not Phase.LOSS and found.tensor != "norm"]
    return tuple(drawn for found in chosen[:MAX_TENSORS] for drawn in _drawn(again.moments, found, _mesh(scenario, found.step)))


def _mesh(scenario: Scenario, step: int) -> Mesh:
    """Return the mesh that runs a step. Before a checkpoint, this is the first layout's mesh."""
    resume = scenario.resume
    return resume.layout.mesh if resume is not None and step < resume.steps else scenario.layout.mesh


def _drawn(moments: Sequence[Compared], found: Divergence, mesh: Mesh) -> Iterator[DrawnTensor]:
    for moment in moments:
        row = moment.expected.table.rows.get(found.tensor)
        if row is not None and (moment.expected.step, moment.expected.phase) == (found.step, found.phase):
            yield _of_moment(moment, row, found, mesh)


def _of_moment(moment: Compared, row: int, found: Divergence, mesh: Mesh) -> DrawnTensor:
    shape = moment.expected.table.shapes[row]
    sides = _sides(shape)
    step = max(1, math.ceil(max(sides) / _MAX_SIDE))
    marks = [_marks(moment, row, rank) for rank in range(len(moment.snapshots))]
    if found.difference is Difference.RANKS_DISAGREE:
        marks = _disagreeing(marks)
    blocks = []
    for rank, (held, wrong, _) in enumerate(marks):
        has, off = (_cells(flags, sides, step) for flags in (held, wrong))
        blocks.append(
            Block(
                rank=rank,
                where=_place(mesh, rank),
                words=_share(int(held.sum()), int(wrong.sum()), held.size),
                held=_path(has),
                wrong=_path(off),
                crosses="".join(f"M{x} {y}l1 1" for y, x in np.argwhere(off)),
            )
        )
    cell = f", a cell is {step} x {step} elements" if step > 1 else ""
    return DrawnTensor(
        name=place(found),
        shape=f"{' x '.join(map(str, shape)) or 'a scalar'}{cell}",
        words=_words(found),
        columns=max(1, math.ceil(sides[1] / step)),
        rows=max(1, math.ceil(sides[0] / step)),
        blocks=tuple(blocks),
    )


def _marks(moment: Compared, row: int, rank: int) -> tuple[Flags, Flags, Vector]:
    """Return a mask for held elements, a mask for elements beyond tolerance, and the rank's values."""
    table, expected = moment.expected.table, moment.expected
    size = math.prod(table.shapes[row])
    start = table.offsets[row]
    right = expected.values[start : start + size]
    values, held = np.full(size, np.nan), np.zeros(size, dtype=np.bool_)
    for piece, found in values_by_piece(moment.snapshots[rank]):
        where = table.positions(piece) if piece.name == table.names[row] and found is not None else None
        if where is not None:
            values[where - start], held[where - start] = found, True
    with np.errstate(invalid="ignore"):
        distance = np.abs(values - right)
    same = (values == right) | (np.isnan(values) & np.isnan(right))
    off = ~same & ~(distance <= expected.tolerances[row] / math.sqrt(max(1, size)))
    return held, held & off, values


def _disagreeing(marks: list[tuple[Flags, Flags, Vector]]) -> list[tuple[Flags, Flags, Vector]]:
    """Mark elements on which ranks disagree as wrong too, even within tolerance."""
    held = np.array([mark[0] for mark in marks])
    values = np.where(held, np.array([mark[2] for mark in marks]), np.nan)
    low, high = (reduce(np.where(held, values, -far), axis=0) for reduce, far in ((np.max, np.inf), (np.min, -np.inf)))
    apart = low != high
    return [(mark[0], mark[1] | (mark[0] & apart), mark[2]) for mark in marks]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns for a shape. All dims except the last are rows."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _cells(flags: Flags, sides: tuple[int, int], step: int) -> Flags:
    """Return, for each cell, whether any of its elements is marked."""
    rows, columns = (math.ceil(side / step) for side in sides)
    padded = np.zeros((rows * step, columns * step), dtype=np.bool_)
    padded[: sides[0], : sides[1]] = flags.reshape(sides)
    return np.asarray(padded.reshape(rows, step, columns, step).any(axis=(1, 3)))


def _path(cells: Flags) -> str:
    """Return an SVG path with the marked cells as rectangles; neighbors in a row share a rectangle."""
    parts = []
    for y, row in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
        parts += [f"M{left} {y}h{right - left}v1h{left - right}z" for left, right in edges.reshape(-1, 2)]
    return "".join(parts)


def _place(mesh: Mesh, rank: int) -> str:
    coordinates = zip(mesh.names, mesh.coordinate(rank), strict=True)
    return "" if len(mesh.axes) == 1 else ", ".join(f"{name} {index}" for name, index in coordinates)


def _share(held: int, wrong: int, total: int) -> str:
    if not held:
        return "holds none of it"
    part = "all of it" if held == total else f"{held:,} of {total:,}"
    return f"holds {part}, {'all' if wrong == held else f'{wrong:,}' if wrong else 'none'} wrong"


def _words(found: Divergence) -> str:
    if found.difference is not Difference.VALUE:
        elsewhere = f"; {found.elsewhere}" if found.elsewhere else ""
        difference = found.difference.value.replace("_", " ")
        return f"{difference}: {found.actual} {ranks_with_value(found)}, expected {found.expected}{elsewhere}"
    where = f"[{', '.join(map(str, found.index))}] " if found.index else ""
    return f"worst element {where}is {found.actual}, expected {found.expected}: {found.error:.3g} x tolerance"


def holders(again: SecondRun) -> dict[str, tuple[str, ...]]:
    """Return each parameter's local shape on each rank, after the last update."""
    last = next((moment for moment in reversed(again.moments) if moment.expected.phase is Phase.UPDATE), None)
    if last is None:
        return {}
    held = [_sizes(moment.pieces) for moment in last.snapshots]
    return {name: tuple(rank.get(name, "nothing") for rank in held) for name in last.expected.table.names}


def _sizes(pieces: Sequence[Piece]) -> dict[str, str]:
    found: dict[str, str] = {}
    for piece in pieces:
        if piece.name and piece.numel:
            box = piece.size if piece.start else piece.shape
            found[piece.name] = count(piece.numel, "element") if piece.run is not None else " x ".join(map(str, box)) or "scalar"
    return found
