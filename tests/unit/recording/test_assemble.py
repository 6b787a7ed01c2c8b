"""Ranks' parts are added once each; holes and overlaps are reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from equivcheck.recording.assemble import Cover, Part, assemble
from equivcheck.recording.exact import ExactHash, hash_parts
from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece
from unit.recording.partitions import SHAPES, partitions


def parts_of(tensor: np.ndarray[tuple[int, ...], np.dtype[np.float64]], pieces: list[Piece]) -> list[Part[ExactHash]]:
    """One rank for each piece."""
    values = hash_parts([(piece, torch.from_numpy(select_piece(tensor, piece).copy())) for piece in pieces])
    return [Part(rank=rank, piece=piece, value=value) for rank, (piece, value) in enumerate(zip(pieces, values, strict=True))]


@given(st.data(), SHAPES, st.integers(0, 2**32 - 1))
def test_a_partition_and_its_replicas_are_the_full_tensor(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """Replicas are listed and count once."""
    tensor, pieces = np.asarray(np.random.default_rng(seed).standard_normal(shape)), data.draw(partitions(shape))
    filled = [piece for piece in pieces if piece.numel]
    copies = data.draw(st.lists(st.sampled_from(filled), max_size=3)) if filled else []
    found = assemble(parts_of(tensor, pieces + copies))
    assert found.cover is Cover.ONCE
    assert found.value == (parts_of(tensor, [Piece(name="weight", shape=shape)])[0].value if filled else None)
    assert sum(len(each) - 1 for each in found.replicas) == len(copies)


@given(st.data(), SHAPES)
def test_a_part_too_few_or_too_many_is_reported(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Nothing is added up then."""
    tensor, pieces = np.zeros(shape), data.draw(partitions(shape))
    filled = [piece for piece in pieces if piece.numel]
    assume(len(filled) > 1)
    lost = data.draw(st.sampled_from(filled))
    found = assemble(parts_of(tensor, [piece for piece in filled if piece is not lost]))
    assert (found.cover, found.value) == (Cover.HOLES, None)
    found = assemble(parts_of(tensor, [*filled, Piece(name="weight", shape=shape)]))
    assert (found.cover, found.value) == (Cover.OVERLAP, None)


def test_many_ranks_are_not_compared_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither boxes in a grid nor runs: a thousand ranks would make half a million pairs for each tensor."""
    monkeypatch.setattr("equivcheck.recording.assemble._share", None)
    boxes = [
        Piece(name="w", shape=(64, 64), start=(row, column), size=(2, 8)) for row in range(0, 64, 2) for column in range(0, 64, 8)
    ]
    runs = [Piece(name="w", shape=(4096,), run=(offset, 16)) for offset in range(0, 4096, 16)]
    for pieces in (boxes, runs):
        values = parts_of(np.zeros(pieces[0].shape), pieces)
        assert assemble(values).cover is Cover.ONCE
        assert assemble([*values[1:], values[-1]]).cover is Cover.HOLES


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            Piece(name="w", shape=(4, 2), start=(0, 0), size=(2, 2)),
            Piece(name="w", shape=(4, 2), start=(1, 0), size=(2, 2)),
        ),
        (Piece(name="w", shape=(8,), run=(0, 4)), Piece(name="w", shape=(8,), run=(2, 4))),
        (
            Piece(name="w", shape=(4, 2), start=(0, 0), size=(4, 1)),
            Piece(name="w", shape=(4, 2), start=(0, 0), size=(2, 2)),
        ),
        (
            Piece(name="w", shape=(4, 2), start=(0, 0), size=(4, 1), run=(1, 2)),
            Piece(name="w", shape=(4, 2), run=(0, 6)),
        ),
    ],
)
def test_overlapping_parts_with_the_right_number_of_elements_are_reported(one: Piece, other: Piece) -> None:
    """The number of elements alone would not show it."""
    assert one.numel + other.numel == 8
    assert assemble(parts_of(np.zeros(one.shape), [one, other])).cover is Cover.OVERLAP
