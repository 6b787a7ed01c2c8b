"""Reads full tensors from DTensors, and checks that DTensors match their placements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from equivcheck.errors import EquivCheckError
from equivcheck.programs.run.values import chunk


class ShapesDisagree(EquivCheckError):
    """A DTensor's shape differs from its full tensor's shape."""


def full_of(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. Raises `ShapesDisagree` if its shape differs from the DTensor's, with the same number of elements.

    If the number of elements differs, nothing is raised, because the comparison with one device finds it.
    """
    if not isinstance(value, DTensor):
        return value
    full: torch.Tensor = value.full_tensor()
    if full.shape != value.shape and full.numel() == value.numel():
        raise ShapesDisagree(f"a DTensor of shape {tuple(value.shape)} has shape {tuple(full.shape)} in full_tensor()")
    return full


class PartsDisagree(EquivCheckError):
    """A DTensor has another shape or dtype than on one device, or its local shape contradicts its placements."""


def require_parts(value: torch.Tensor, expected: torch.Tensor, coordinate: Sequence[int]) -> None:
    """Raise `PartsDisagree` if the local tensor's shape contradicts the placements.

    `coordinate` is the rank's position on the mesh. `PartsDisagree` is also raised if shape or dtype of the value differ from the
    expected ones. Reading such a tensor would fail on some ranks only, and the error would not name the operation.
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
