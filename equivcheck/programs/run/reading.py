"""Reads full tensors from DTensors, and checks that a DTensor's local tensor matches its placements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from equivcheck.errors import EquivCheckError
from equivcheck.programs.run.values import chunk


class ShapesDisagree(EquivCheckError):
    """A DTensor has one shape, and `full_tensor()` returns a tensor with another shape."""


def full_of(value: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's full tensor. A plain tensor is returned as it is.

    Raises `ShapesDisagree` if the full tensor has as many elements as the DTensor, but another shape. Nothing is raised if the
    number of elements differs, because the comparison with one device finds this error.
    """
    if not isinstance(value, DTensor):
        return value
    full: torch.Tensor = value.full_tensor()
    if full.shape != value.shape and full.numel() == value.numel():
        raise ShapesDisagree(f"a DTensor of shape {tuple(value.shape)} has shape {tuple(full.shape)} in full_tensor()")
    return full


class PartsDisagree(EquivCheckError):
    """A DTensor has another shape or dtype than the tensor on one device, or its local shape contradicts its placements."""


def require_parts(value: torch.Tensor, expected: torch.Tensor, coordinate: Sequence[int]) -> None:
    """Raise `PartsDisagree` if a DTensor's local shape contradicts its placements, or its shape or dtype differs from `expected`.

    `coordinate` is the rank's position on the mesh. Without this check, reading such a tensor would fail on some ranks only, and
    the error would not name the operation.
    """
    if not (isinstance(value, DTensor) and all(type(each) in (Shard, Replicate, Partial) for each in value.placements)):
        return
    with torch.no_grad():
        part, found = torch.empty(value.shape, device="meta"), tuple(value.to_local().shape)
    for size, index, placement in zip(value.device_mesh.shape, coordinate, value.placements, strict=True):
        if isinstance(placement, Shard):
            part = chunk(part, size, index, placement.dim)
    if found != part.shape:
        raise PartsDisagree(f"a part of a DTensor of shape {tuple(value.shape)} has shape {found}, not {tuple(part.shape)}")
    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
        raise PartsDisagree(f"a DTensor is {_kind(value)}, on one device {_kind(expected)}")


def _kind(value: torch.Tensor) -> str:
    """Return dtype and shape: ``float64 of shape (2, 3)``."""
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
