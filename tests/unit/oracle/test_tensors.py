"""Tests for the table of tensors."""

import numpy as np
import pytest

from equivcheck.worlds.trace.tensors import full_vector, norms, table_of
from equivcheck.worlds.trace.trace import Piece

WHOLE = (Piece(name="a", shape=(2, 3)), Piece(name="b", shape=(4,)))


@pytest.mark.parametrize(
    ("piece", "positions"),
    [
        (Piece(name="a", shape=(2, 3)), [0, 1, 2, 3, 4, 5]),
        (Piece(name="b", shape=(4,)), [6, 7, 8, 9]),
        (Piece(name="a", shape=(2, 3), start=(1, 0), size=(1, 3)), [3, 4, 5]),
        (Piece(name="a", shape=(2, 3), start=(0, 1), size=(2, 2)), [1, 2, 4, 5]),
        (Piece(name="a", shape=(2, 3), run=(2, 3)), [2, 3, 4]),
        (Piece(name="a", shape=(2, 3), start=(0, 1), size=(2, 2), run=(1, 2)), [2, 4]),
        (Piece(name="a", shape=(2, 3), start=(0, 1), size=(2, 2), run=(0, 0)), []),
        (Piece(name="b", shape=(4,), start=(4,), size=(0,)), []),
    ],
)
def test_a_piece_lies_where_its_region_says(piece: Piece, positions: list[int]) -> None:
    """Positions in the flat vector follow from the region: full, box or flat range."""
    found = table_of(WHOLE).positions(piece)

    assert found is not None
    assert found.tolist() == positions


@pytest.mark.parametrize("piece", [Piece(name="c", shape=(4,)), Piece(name="b", shape=(2, 2))])
def test_a_tensor_of_another_name_or_shape_has_no_place(piece: Piece) -> None:
    """A tensor that the reference lacks has no position."""
    assert table_of(WHOLE).positions(piece) is None


def test_absent_tensors_are_zero_in_the_full_vector() -> None:
    """Other tensors keep their positions if one is None, also for several runs."""
    values = np.arange(1.0, 5.0)

    assert full_vector(table_of(WHOLE), (False, True), values).tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert full_vector(table_of(WHOLE), (False, True), np.stack([values, values])).shape == (2, 10)


def test_norms_are_per_tensor() -> None:
    """Each tensor has its own Frobenius norm, also for several vectors."""
    vector = np.array([3.0, 0, 0, 0, 0, 4.0, 1, 1, 1, 1])

    assert norms(table_of(WHOLE), np.stack([vector, 2 * vector])).tolist() == [[5, 2], [10, 4]]
