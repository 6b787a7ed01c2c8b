"""Hashes of samples are equal for equal rows only, wherever the rows are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.recording.watch.samples import hash_samples, tensors_in

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
)

GOLDEN = ["0x3423dc2c22d9285", "0x8722937f1721d72c"]


def hashes_of(*tensors: torch.Tensor) -> list[int]:
    """Hashes as numbers."""
    found = hash_samples(tensors)
    assert found is not None
    return [int(each) for each in found]


def rows(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random rows."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 200
    return values % 2 > 1 if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(order=st.permutations(range(6)), split=st.integers(1, 5))
def test_the_hash_of_a_row_does_not_depend_on_the_batch(dtype: torch.dtype, order: list[int], split: int) -> None:
    """Its position, its neighbours, and strides are free."""
    batch, other = rows(dtype, 6, 3, 5), rows(torch.int64, 6, 2)
    expected = hashes_of(batch, other)
    assert len(set(expected)) == 6
    mixed = [hashes_of(batch[part], other[part]) for part in (order[:split], order[split:])]
    assert [each for part in mixed for each in part] == [expected[number] for number in order]
    assert hashes_of(batch.transpose(1, 2).contiguous().transpose(1, 2), other) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(row=st.integers(0, 5), column=st.integers(0, 14))
def test_one_other_element_gives_another_hash(dtype: torch.dtype, row: int, column: int) -> None:
    """In its row only."""
    batch = rows(dtype, 6, 15)
    changed = batch.clone()
    changed[row, column] = ~changed[row, column] if dtype is torch.bool else changed[row, column] + 1
    before, after = hashes_of(batch), hashes_of(changed)
    assert [number for number in range(6) if before[number] != after[number]] == [row]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_signs_of_two_elements_do_not_cancel(dtype: torch.dtype) -> None:
    """A sign is the highest bit, which a product modulo a power of two may lose."""
    batch = rows(dtype, 1, 8) + 1
    turned = batch.clone()
    turned[:, [2, 5]] *= -1
    assert hashes_of(batch) != hashes_of(turned)


def test_elements_and_tensors_cannot_be_exchanged() -> None:
    """A sum without weights would not see it."""
    one, other = rows(torch.int64, 4, 3), rows(torch.int64, 4, 3, seed=1)
    assert hashes_of(one, other) != hashes_of(other, one)
    assert hashes_of(one) != hashes_of(one.flip(1))


def test_only_tensors_with_the_first_ones_rows_count() -> None:
    """Scalars and tables of another length belong to no sample."""
    batch = rows(torch.float32, 4, 3)
    assert hashes_of(batch, torch.tensor(2.0), rows(torch.float32, 7, 2)) == hashes_of(batch)
    assert hash_samples([torch.tensor(1.0)]) is None
    assert hash_samples([]) is None
    assert hash_samples([torch.zeros(0, 3)]) is None


def test_zeros_at_the_end_do_not_change_a_hash() -> None:
    """A batch pads its rows to its longest one."""
    batch = rows(torch.int64, 4, 3)
    assert hashes_of(torch.cat([batch, torch.zeros(4, 2, dtype=torch.int64)], dim=1)) == hashes_of(batch)


def test_hashes_do_not_change() -> None:
    """They are part of the trace format."""
    assert [hex(each % 2**64) for each in hashes_of(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5], [-1.0]]))] == GOLDEN


@dataclass
class Batch:
    """A batch with names."""

    tokens: torch.Tensor
    mask: torch.Tensor | None


def test_tensors_are_found_inside_containers() -> None:
    """Mappings are sorted, so that the order of keyword arguments does not matter."""
    a, b, c, d = (torch.tensor([number]) for number in range(4))
    found = list(tensors_in([(a, {"y": c, "x": [b, "text", 3]}), Batch(d, None), Batch]))
    assert [int(each) for each in found] == [0, 1, 2, 3]
