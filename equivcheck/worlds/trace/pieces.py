"""Splits full tensors into the ranks' pieces, and assembles full tensors from pieces."""

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
    """Return the full tensors in a snapshot from one device, by name."""
    found, place = {}, 0
    for piece, present in zip(snapshot.pieces, snapshot.present, strict=True):
        if present:
            found[piece.name] = snapshot.values[place : place + piece.numel].astype(np.float64).reshape(piece.shape)
            place += piece.numel
    return found


def select_piece(whole: npt.NDArray[Any], piece: Piece) -> npt.NDArray[Any]:
    """Return the elements of a piece, taken from the full tensor `whole` and flattened."""
    if piece.start:
        whole = whole[tuple(slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True))]
    flat = whole.reshape(-1)
    if piece.run is None:
        return flat
    offset, length = piece.run
    return flat[offset : offset + length]


def values_by_piece(snapshot: Snapshot) -> list[tuple[Piece, Vector | None]]:
    """Return each piece of a rank's snapshot with its values; None for missing values. Do not change the values in place."""
    found: list[tuple[Piece, Vector | None]] = []
    place = 0
    for piece, present, fits in zip(snapshot.pieces, snapshot.present, snapshot.fits, strict=True):
        there = present and fits
        found.append((piece, snapshot.values[place : place + piece.numel].astype(np.float64, copy=False) if there else None))
        place += piece.numel if there else 0
    return found


def fill(whole: npt.NDArray[Any], piece: Piece, values: npt.NDArray[Any]) -> None:
    """Write a piece's values into the full tensor `whole`, in place."""
    places = select_piece(np.arange(whole.size).reshape(piece.shape), piece)
    flat = whole.reshape(-1)
    flat[places] = values
    if not np.shares_memory(flat, whole):
        whole[...] = flat.reshape(whole.shape)


def assemble_tensors(snapshots: Sequence[Snapshot]) -> TensorsByName:
    """Assemble full tensors from all ranks' snapshots. If no rank has an element, it is NaN.

    If ranks disagree about an element, the lowest rank's value is used.
    """
    found: TensorsByName = {}
    for snapshot in reversed(snapshots):
        for piece, values in values_by_piece(snapshot):
            if piece.name and values is not None:
                whole = found.setdefault(piece.name, np.full(piece.shape, np.nan))
                if whole.shape == piece.shape:
                    fill(whole, piece, values)
    return found
