"""Values for leaves and constants, and each rank's part. Leaves are dyadic numbers, so that partial values sum exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.programs.nouns.placement import reduction_of, sharded_dim
from equivcheck.programs.nouns.program import Constant, Contents, Leaf


def full_tensor(statement: Leaf | Constant) -> torch.Tensor:
    """Return a leaf's or constant's values as a full tensor: float64, or integers or booleans."""
    chance = np.random.default_rng(statement.seed)
    count = math.prod(statement.shape)
    if isinstance(statement, Leaf):
        return torch.from_numpy(_distinct(chance, count, statement.seed)).view(statement.shape)
    if statement.contents is Contents.ORDER:
        return _orders(chance, statement)
    if statement.contents is Contents.INDICES:
        numbers = torch.from_numpy(chance.integers(0, statement.high, count))
    elif statement.contents is Contents.MASK:
        numbers = torch.from_numpy(chance.integers(0, 2, count)).bool()
    else:
        numbers = torch.from_numpy(_distinct(chance, count, statement.seed)).abs() + 0.5
    return numbers.view(statement.shape)


def _distinct(chance: np.random.Generator, count: int, seed: int) -> npt.NDArray[np.floating]:
    """Draw distinct non-zero values between about -1 and 1, on a power-of-two grid. Neighbouring seeds share no values."""
    unit = 2.0 ** (1 - max(1, count - 1).bit_length())
    return (chance.permutation(count) - count // 2 + 0.25) * unit + seed % 8 / 1024


def _orders(chance: np.random.Generator, statement: Constant) -> torch.Tensor:
    size = statement.shape[-1] if statement.shape else 1
    rows = [chance.permutation(statement.high)[:size] for _ in range(math.prod(statement.shape[:-1]))]
    return torch.from_numpy(np.array(rows, dtype=np.int64)).view(statement.shape)


def weights_of(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Return a factor for each element of a value. The backward pass starts from the sum over all elements times factors."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, dtype=torch.float64) * 7 + number * 3) % 16 - 6.5).view(tuple(shape)) / 8


def local_part(full: torch.Tensor, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[str]) -> torch.Tensor:
    """Return a rank's local tensor: the shard that `torch.chunk` gives, or a partial value.

    `coordinate` is the rank's position on the mesh.
    """
    part = full
    for size, index, placement in zip(mesh, coordinate, placements, strict=True):
        reduction = reduction_of(placement)
        if reduction is not None:
            part = partial_value(part, size, index, reduction)
    for size, index, placement in zip(mesh, coordinate, placements, strict=True):
        dim = sharded_dim(placement)
        if dim is not None:
            part = chunk(part, size, index, dim)
    return part.clone()


def chunk(full: torch.Tensor, size: int, index: int, dim: int) -> torch.Tensor:
    """Return chunk `index` if dim `dim` is split into `size` chunks; empty if there are fewer chunks."""
    extent = full.shape[dim]
    length = -(-extent // size)
    start = min(index * length, extent)
    return full.narrow(dim, start, min(start + length, extent) - start)


def partial_value(full: torch.Tensor, size: int, index: int, reduction: str) -> torch.Tensor:
    """Return the partial value on rank `index`. The reduction over all `size` ranks gives the full value.

    No single rank has the full value.
    """
    if reduction in ("max", "min"):
        holder = torch.arange(full.numel()).view(full.shape) % size == index
        return torch.where(holder, full, full + (1.0 if reduction == "min" else -1.0))
    others = [full.flatten().roll(each).view(full.shape) / 2 for each in range(1, size)]
    own = full - sum(others) if index == 0 else others[index - 1]
    return own * size if reduction == "avg" else own
