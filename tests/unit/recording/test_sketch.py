"""Sketches of parts add up to the sketch of the full tensor, and estimate how far two tensors are apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.recording.sketch import EMPTY, Sketch, sketch_parts
from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece
from unit.recording.partitions import SHAPES, partitions

EPS = torch.finfo(torch.float64).eps


def sketch(tensor: torch.Tensor) -> Sketch:
    """Sketch of a full tensor."""
    return sketch_parts([(Piece(name="weight", shape=tuple(tensor.shape)), tensor)])[0]


def random_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal numbers in float64."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@given(st.data(), SHAPES, st.integers(0, 2**32 - 1))
def test_parts_of_any_partition_add_up(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """The sum is within 16 eps of the norm for all boxes and runs."""
    tensor, pieces = random_tensor(shape, seed), data.draw(partitions(shape))
    parts = [(piece, torch.from_numpy(select_piece(tensor.numpy(), piece).copy())) for piece in pieces]
    total, whole = sum(sketch_parts(parts), EMPTY), sketch(tensor)
    assert np.abs(total.sums - whole.sums).max() <= 16 * EPS * whole.norm
    assert total.squares == pytest.approx(whole.squares, rel=max(shape, default=1) * 16 * EPS)
    assert (total.minimum, total.maximum) == (whole.minimum, whole.maximum)


@pytest.mark.parametrize("shape", [(4095,), (4097,), (65, 65), (9, 20_000), (300_000, 2), (3, 64, 1024)])
def test_large_tensors_have_the_sums_of_their_signs(shape: tuple[int, ...]) -> None:
    """Slabs, the batched path and long tables give the same sums as single elements."""
    tensor = random_tensor(shape, 0)
    ones = np.zeros((2, math.prod(shape)))
    places = [0, math.prod(shape) // 2 + 1]
    ones[[0, 1], places] = 1.0
    signs = [sketch(torch.from_numpy(one.reshape(shape))).sums for one in ones]
    assert all(set(np.abs(each)) == {1.0} for each in signs)
    changed = tensor.clone().reshape(-1)
    changed[places] += torch.tensor([3.0, -5.0], dtype=torch.float64)
    moved = sketch(changed.reshape(shape)).sums - sketch(tensor).sums
    assert moved == pytest.approx(3.0 * signs[0] - 5.0 * signs[1], abs=1e-9)


@given(st.lists(SHAPES, max_size=12), st.sampled_from([2, 8]), st.integers(0, 2**32 - 1))
def test_tensors_that_are_summed_together_have_their_own_sketches(shapes: list[tuple[int, ...]], repeats: int, seed: int) -> None:
    """Others change nothing but rounding, whether few or many have the same position."""
    tensors = [random_tensor(shape, seed + number) for number, shape in enumerate(shapes * repeats)]
    parts = [(Piece(name=str(number), shape=tuple(tensor.shape)), tensor) for number, tensor in enumerate(tensors)]
    for tensor, found in zip(tensors, sketch_parts(parts), strict=True):
        own = sketch(tensor)
        assert np.abs(found.sums - own.sums).max() <= 16 * EPS * own.norm
        assert (found.minimum, found.maximum) == (own.minimum, own.maximum)


def difference(rng: np.random.Generator) -> torch.Tensor:
    """One of the differences that parallel trainings have: dense, one row, one column, rank one, constant, few elements."""
    shape = SOME_SHAPES[rng.integers(len(SOME_SHAPES))]
    found, kind = rng.standard_normal(shape), rng.integers(6)
    if kind == 1:
        found[1:] = 0.0
    elif kind == 2:
        found[:, 1:] = 0.0
    elif kind == 3:
        found = np.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1]))
    elif kind == 4:
        found = np.full(shape, rng.standard_normal())
    elif kind == 5:
        found[rng.random(shape) > 5 / found.size] = 0.0
    return torch.from_numpy(found)


SOME_SHAPES = ((1, 1), (2, 2), (3, 5), (7, 40), (33, 8), (64, 64), (9, 200), (80, 13))


def test_the_estimate_is_near_the_distance() -> None:
    """Of 2,000 differences at fixed seeds at most 2 are estimated below 0.3 or above 2.2 times their norm."""
    rng = np.random.default_rng(0)
    tensors = [difference(rng) for _ in range(2000)]
    sketches = sketch_parts([(Piece(name="weight", shape=tuple(tensor.shape)), tensor) for tensor in tensors])
    ratios = [each.distance(EMPTY) / each.norm for each in sketches if each.squares]
    assert len(ratios) > 1900
    assert sum(not 0.3 <= ratio <= 2.2 for ratio in ratios) <= 2


@pytest.mark.parametrize("shape", [(2,), (2, 2), (3, 3), (4, 4), (1, 16), (2, 2, 4)])
def test_no_difference_of_a_small_tensor_is_hidden(shape: tuple[int, ...]) -> None:
    """Its elements have signs of their own. Estimates are between the extreme singular values of these, relative to the norm."""
    ones = torch.eye(math.prod(shape), dtype=torch.float64)
    signs = np.array([sketch(one.reshape(shape)).sums for one in ones])
    values = np.linalg.svd(signs / math.sqrt(signs.shape[1]), compute_uv=False)
    assert 0.3 <= values.min() <= values.max() <= 2.2


def test_the_distance_is_that_of_the_difference() -> None:
    """Sketches are linear."""
    one, other = random_tensor((30, 20), 0), random_tensor((30, 20), 1)
    assert sketch(one).distance(sketch(other)) == pytest.approx(sketch(one - other).distance(EMPTY), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [40, 5000])
def test_every_dtype_is_summed_in_float64(dtype: torch.dtype, numel: int) -> None:
    """As its values in float64, in both paths."""
    tensor = (torch.arange(numel) % 2).to(dtype)
    one, other = sketch(tensor), sketch(tensor.to(torch.float64))
    assert (one.sums == other.sums).all()
    assert (one.squares, one.minimum, one.maximum) == (pytest.approx(other.squares), other.minimum, other.maximum)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [40, 5000])
def test_a_value_that_is_not_finite_shows(bad: float, numel: int) -> None:
    """It is the minimum or maximum, and no sum hides it, also after other parts are added."""
    tensor = torch.ones(numel)
    tensor[7] = bad
    found = sketch(tensor) + sketch(torch.ones(3))
    assert not math.isfinite(found.minimum) or not math.isfinite(found.maximum)
    assert not np.isfinite(found.sums).any()


def test_format_version_1_has_these_sketches() -> None:
    """A stored trace stays readable: a change of these numbers needs a new format version."""
    shapes = [(), (5,), (300,), (3, 4), (2, 3, 4), (70, 90)]
    tensors = [torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1 for shape in shapes]
    found = [[int(value) for value in sketch(tensor).sums[:6]] for tensor in tensors]
    assert found == GOLDEN


GOLDEN = [
    [1, -1, 1, -1, -1, -1],
    [11, -9, 11, 3, -11, -15],
    [784, 1232, -298, 878, 6118, -4752],
    [26, -48, 42, 28, 40, 28],
    [-60, -106, 40, -68, 154, -130],
    [-272790, 276460, 772, -75136, 123090, -400460],
]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_has_the_same_sums() -> None:
    """Within the rounding of float64."""
    tensors = [random_tensor(shape, 1) for shape in ((40,), (5000,), (64, 64), (300, 2000))]
    parts = [(Piece(name="weight", shape=tuple(tensor.shape)), tensor) for tensor in tensors]
    device = torch.accelerator.current_accelerator()
    for one, other in zip(
        sketch_parts(parts), sketch_parts([(piece, tensor.to(device)) for piece, tensor in parts]), strict=True
    ):
        assert np.abs(one.sums - other.sums).max() <= 64 * EPS * one.norm
        assert (one.minimum, one.maximum) == (other.minimum, other.maximum)
