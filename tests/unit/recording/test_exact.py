"""Exact hashes of parts add up to the bit, and differ if one bit differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.recording.exact import ExactHash, hash_parts
from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece
from unit.recording.partitions import SHAPES, partitions


def exact_hash(tensor: torch.Tensor) -> ExactHash:
    """Hash of a full tensor."""
    return hash_parts([(Piece(name="weight", shape=tuple(tensor.shape)), tensor)])[0]


@given(st.data(), SHAPES, st.integers(0, 2**32 - 1))
def test_parts_of_any_partition_add_up(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """The sum is exact for all boxes and runs."""
    tensor, pieces = np.random.default_rng(seed).standard_normal(shape), data.draw(partitions(shape))
    parts = [(piece, torch.from_numpy(select_piece(tensor, piece).copy())) for piece in pieces]
    assert sum(hash_parts(parts), ExactHash(in_place=0, anywhere=0)) == exact_hash(torch.from_numpy(np.asarray(tensor)))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_one_other_element_changes_both_hashes(dtype: torch.dtype) -> None:
    """In each element type."""
    tensor = (torch.arange(60).reshape(5, 12) % 2).to(dtype)
    other = tensor.clone()
    other[3, 7] = 1 - other[3, 7].to(torch.int64)
    assert exact_hash(tensor).in_place != exact_hash(other).in_place
    assert exact_hash(tensor).anywhere != exact_hash(other).anywhere


def test_elements_that_moved_are_the_same_anywhere() -> None:
    """Permuted rows have other hashes in place only."""
    tensor = torch.arange(60.0).reshape(5, 12)
    one, other = exact_hash(tensor), exact_hash(tensor[[1, 0, 2, 3, 4]])
    assert one.anywhere == other.anywhere
    assert one.in_place != other.in_place


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_has_the_same_hashes() -> None:
    """To the bit."""
    tensors = [torch.randn(40), torch.randn(64, 90).to(torch.bfloat16), torch.arange(5000)]
    assert [exact_hash(tensor.to(torch.accelerator.current_accelerator())) for tensor in tensors] == [*map(exact_hash, tensors)]


def test_format_version_1_has_these_hashes() -> None:
    """A stored trace stays comparable: a change of these numbers needs a new format version."""
    assert [exact_hash(tensor) for tensor in (torch.tensor(1.5), torch.arange(300.0), torch.arange(12.0).reshape(3, 4))] == GOLDEN


GOLDEN = [
    ExactHash(in_place=7582897212397453312, anywhere=6150636740431618511),
    ExactHash(in_place=3888584081370382336, anywhere=2048090098975958760),
    ExactHash(in_place=6642630386776014848, anywhere=6649330114176566668),
]
