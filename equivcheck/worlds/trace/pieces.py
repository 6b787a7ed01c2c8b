"""Converts between pieces on ranks and full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Piece, Snapshot

TensorsByName = dict[str, Vector]
"""Full tensors by name; tensors that are None are missing."""


def full_tensors_of(snapshot: Snapshot) -> TensorsByName:
    """Return full tensors from a single-device snapshot."""
    found, place = {}, 0
    for piece, present in zip(snapshot.pieces, snapshot.present, strict=True):
        if present:
            found[piece.name] = snapshot.values[place : place + piece.numel].astype(np.float64).reshape(piece.shape)
            place += piece.numel
    return found


def select_piece(whole: npt.NDArray[Any], piece: Piece) -> npt.NDArray[Any]:
    """Return a piece's elements from the full tensor, flat."""
    if piece.start:
        whole = whole[tuple(slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True))]
    flat = whole.reshape(-1)
    if piece.run is None:
        return flat
    offset, length = piece.run
    return flat[offset : offset + length]


def values_by_piece(snapshot: Snapshot) -> list[tuple[Piece, Vector | None]]:
    """Return each piece in a rank's snapshot with its values; None if the values are missing. The caller must not change them."""
    found: list[tuple[Piece, Vector | None]] = []
    place = 0
    for piece, present, fits in zip(snapshot.pieces, snapshot.present, snapshot.fits, strict=True):
        there = present and fits
        found.append((piece, snapshot.values[place : place + piece.numel].astype(np.float64, copy=False) if there else None))
        place += piece.numel if there else 0
    return found


def fill(whole: npt.NDArray[Any], piece: Piece, values: npt.NDArray[Any]) -> None:
    """Write a piece's values into the full tensor, in place."""
    places = select_piece(np.arange(whole.size).reshape(piece.shape), piece)
    flat = whole.reshape(-1)
    flat[places] = values
    if not np.shares_memory(flat, whole):
        whole[...] = flat.reshape(whole.shape)


def assemble_tensors(snapshots: Sequence[Snapshot]) -> TensorsByName:
    """Assemble full tensors from all ranks' snapshots; NaN where no rank has an element.

    If ranks disagree, the lowest rank's values are used.
    """
    found: TensorsByName = {}
    for snapshot in reversed(snapshots):
        for piece, values in values_by_piece(snapshot):
            if piece.name and values is not None:
                whole = found.setdefault(piece.name, np.full(piece.shape, np.nan))
                if whole.shape == piece.shape:
                    fill(whole, piece, values)
    return found
