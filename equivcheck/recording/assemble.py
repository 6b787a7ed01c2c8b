"""Full tensors' sketches from the parts that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece


class Additive(Protocol):
    """A value that can be added: the sum for two disjoint parts is the value for both."""

    def __add__(self, other: Self) -> Self: ...


V = TypeVar("V", bound=Additive)


class Cover(Enum):
    """How the ranks' parts cover a full tensor."""

    ONCE = "once"
    """Each element is in exactly one distinct part."""
    HOLES = "holes"
    """Some elements are in no part."""
    OVERLAP = "overlap"
    """Distinct parts share elements, so that their sums would count these twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[V]):
    """One rank's elements in a tensor."""

    rank: int
    """Rank that holds it."""
    piece: Piece
    """Position in the full tensor."""
    value: V
    """Sketch or hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled(Generic[V]):
    """A full tensor's value, added up from the parts."""

    cover: Cover
    """How the parts cover the tensor."""
    value: V | None
    """Sum over the distinct parts; None unless they cover the tensor once."""
    replicas: tuple[tuple[Part[V], ...], ...]
    """Parts in the same position, for each position that several ranks hold; the first one was added."""


def assemble(parts: Sequence[Part[V]]) -> Assembled[V]:
    """Add up one tensor's parts. Ranks with the same position hold replicas, and only the first counts.

    All parts must have the same full shape. Parts without elements are ignored.
    """
    by_position: dict[Piece, list[Part[V]]] = {}
    for part in parts:
        if part.piece.numel:
            by_position.setdefault(_position(part.piece), []).append(part)
    firsts = [found[0] for found in by_position.values()]
    numel = math.prod(parts[0].piece.shape) if parts else 0
    total = sum(part.piece.numel for part in firsts)
    if total < numel:
        cover = Cover.HOLES
    elif total > numel or _overlap([part.piece for part in firsts]):
        cover = Cover.OVERLAP
    else:
        cover = Cover.ONCE
    value = None
    if cover is Cover.ONCE and firsts:
        value = firsts[0].value
        for part in firsts[1:]:
            value = value + part.value
    replicas = tuple(tuple(found) for found in by_position.values() if len(found) > 1)
    return Assembled(cover=cover, value=value, replicas=replicas)


def _position(piece: Piece) -> Piece:
    """The piece in its shortest form: a full box or a full run is the full tensor."""
    box, run = (piece.start, piece.size), piece.run
    if piece.size == piece.shape:
        box = ((), ())
    if run == (0, math.prod(box[1] or piece.shape)):
        run = None
    return replace(piece, name="", start=box[0], size=box[1], run=run, place=None)


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether any two pieces share an element."""
    return any(_share(one, other) for at, one in enumerate(pieces) for other in pieces[at + 1 :])


def _share(one: Piece, other: Piece) -> bool:
    boxes = [(piece.start or (0,) * len(piece.shape), piece.size or piece.shape) for piece in (one, other)]
    (start, size), (other_start, other_size) = boxes
    for dim in range(len(one.shape)):
        if max(start[dim], other_start[dim]) >= min(start[dim] + size[dim], other_start[dim] + other_size[dim]):
            return False
    if boxes[0] == boxes[1]:
        (offset, length), (other_offset, other_length) = (piece.run or (0, math.prod(size)) for piece in (one, other))
        return max(offset, other_offset) < min(offset + length, other_offset + other_length)
    # Runs in boxes that overlap in part: no parallelism of torch has them, so looking at each element is fast enough.
    indices = np.arange(math.prod(one.shape)).reshape(one.shape)
    return bool(np.intersect1d(select_piece(indices, one), select_piece(indices, other)).size)
