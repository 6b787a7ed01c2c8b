"""Assembles full tensors' sketches and hashes from the parts that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from operator import itemgetter
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece


class Additive(Protocol):
    """Protocol for values that can be added. For two disjoint parts of a tensor, the sum is the value for both together."""

    def __add__(self, other: Self) -> Self: ...


V = TypeVar("V", bound=Additive)


class Cover(Enum):
    """Whether the parts on all ranks contain each element of the full tensor once, leave out elements, or overlap."""

    ONCE = "once"
    """Each element is in exactly one distinct part."""
    HOLES = "holes"
    """Some elements are in no part."""
    OVERLAP = "overlap"
    """Distinct parts share elements, so that a sum over parts would count these elements twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[V]):
    """One rank's elements in a tensor, as a sketch or a hash."""

    rank: int
    """Rank that holds the part."""
    piece: Piece
    """Position of the elements in the full tensor."""
    value: V
    """Sketch or hash of the elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled(Generic[V]):
    """The sketch or hash of a full tensor, added up from the parts on ranks."""

    cover: Cover
    """Whether the parts contain each element once."""
    value: V | None
    """Sum over parts with different positions; None unless these parts contain each element once."""
    replicas: tuple[tuple[Part[V], ...], ...]
    """For each position that several ranks hold, these ranks' parts. Only the first part is in the sum."""


def assemble(parts: Sequence[Part[V]]) -> Assembled[V]:
    """Add up the sketches or hashes of one tensor's parts.

    Parts at the same position in the tensor are replicas, and only the first of them counts. All parts must have the same full
    shape. Parts without elements are ignored.
    """
    cover, positions = _arrange(tuple(part.piece for part in parts))
    value = None
    if cover is Cover.ONCE and positions:
        value = parts[positions[0][0]].value
        for position in positions[1:]:
            value = value + parts[position[0]].value
    replicas = tuple(tuple(parts[at] for at in position) for position in positions if len(position) > 1)
    return Assembled(cover=cover, value=value, replicas=replicas)


@lru_cache(maxsize=2**15)  # all steps and moments share it
def _arrange(pieces: tuple[Piece, ...]) -> tuple[Cover, tuple[tuple[int, ...], ...]]:
    """Return how pieces cover their tensor, and for each position the indices of the pieces in it."""
    found: dict[Piece, list[int]] = {}
    for number, piece in enumerate(pieces):
        if piece.numel:
            found.setdefault(_position(piece), []).append(number)
    numel, total = math.prod(pieces[0].shape) if pieces else 0, sum(piece.numel for piece in found)
    cover = Cover.ONCE
    if total < numel:
        cover = Cover.HOLES
    elif total > numel or _overlap(list(found)):
        cover = Cover.OVERLAP
    return cover, tuple(map(tuple, found.values()))


def _position(piece: Piece) -> Piece:
    """Return the piece with its box in the shortest form: a run that covers the full box is dropped."""
    box = (piece.start, piece.size) if piece.start else ((0,) * len(piece.shape), piece.shape)
    run = None if piece.run == (0, math.prod(box[1])) else piece.run
    return replace(piece, name="", start=box[0], size=box[1], run=run, place=None)


def _overlap(positions: Sequence[Piece], dim: int = 0) -> bool:
    """Whether any two positions share an element. All boxes overlap in the dims before `dim`, perhaps through others."""
    if len(positions) < 2:
        return False
    if dim < len(positions[0].shape):
        intervals = [(piece.start[dim], piece.size[dim]) for piece in positions]
    elif len({(piece.start, piece.size) for piece in positions}) == 1:
        intervals = [piece.run or (0, piece.numel) for piece in positions]
    else:
        return any(_share(one, other) for at, one in enumerate(positions) for other in positions[at + 1 :])
    groups: list[list[Piece]] = []
    end = 0
    for (first, length), piece in sorted(zip(intervals, positions, strict=True), key=itemgetter(0)):
        if not groups or first >= end:
            groups.append([])
        groups[-1].append(piece)
        end = max(end, first + length)
    if dim >= len(positions[0].shape):
        return len(groups) < len(positions)
    return any(_overlap(group, dim + 1) for group in groups)


def _share(one: Piece, other: Piece) -> bool:
    for dim in range(len(one.shape)):
        if max(one.start[dim], other.start[dim]) >= min(one.start[dim] + one.size[dim], other.start[dim] + other.size[dim]):
            return False
    # Boxes that overlap in part: no parallelism of torch makes them, so looking at each element is fast enough.
    indices = np.arange(math.prod(one.shape)).reshape(one.shape)
    return bool(np.intersect1d(select_piece(indices, one), select_piece(indices, other)).size)
