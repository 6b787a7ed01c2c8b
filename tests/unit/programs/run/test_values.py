"""Each rank's part of a leaf."""

from __future__ import annotations

import pytest
import torch

from equivcheck.programs.nouns import Leaf
from equivcheck.programs.run.values import chunk, full_tensor, local_part, partial_value

SHAPES = ((), (1,), (5,), (4, 6), (5, 3), (0, 3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_addends_make_the_whole(shape: tuple[int, ...], size: int) -> None:
    """Exactly, except for an average over three ranks. No single rank has the full value."""
    full = full_tensor(Leaf(shape=shape, placements=("R",)))
    for reduction, reduce in (
        ("sum", lambda parts: parts.sum(0)),
        ("avg", lambda parts: parts.sum(0) / size),
        ("max", lambda parts: parts.amax(0)),
        ("min", lambda parts: parts.amin(0)),
    ):
        parts = torch.stack([partial_value(full, size, index, reduction) for index in range(size)])
        torch.testing.assert_close(reduce(parts), full, rtol=0, atol=1e-15 if size == 3 else 0)
        if size > 1 and full.numel() > 1:
            assert not any(torch.equal(part, full) for part in parts)


@pytest.mark.parametrize("extent", [0, 1, 4, 5, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_those_of_chunk(extent: int, size: int) -> None:
    """Shards match `torch.chunk`, with empty shards at the end."""
    full = torch.arange(extent * 2).view(extent, 2)
    expected = [part for part in full.chunk(size) if part.numel()]
    parts = [chunk(full, size, index, 0) for index in range(size)]
    assert [part.tolist() for part in parts if part.numel()] == [part.tolist() for part in expected]


def test_a_dim_is_cut_twice_outer_axis_first() -> None:
    """The rank (1, 0) of a 2 x 2 mesh has the third quarter."""
    full = torch.arange(8)
    assert local_part(full, (2, 2), (1, 0), ("S(0)", "S(0)")).tolist() == [4, 5]


@pytest.mark.parametrize("seed", range(5))
def test_leaves_are_distinct_and_dyadic(seed: int) -> None:
    """No two elements are equal, none is zero, and sums of a few lose no bit."""
    full = full_tensor(Leaf(shape=(5, 6), placements=("R",), seed=seed))
    assert full.unique().numel() == full.numel()
    assert full.abs().min() > 0
    assert full.abs().max() <= 4
    assert torch.equal((full * 2**20).round(), full * 2**20)
