"""What ranks read of DTensors, and whether these are what they say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from equivcheck.errors import EquivCheckError
from equivcheck.programs.run.values import chunk


class ShapesDisagree(EquivCheckError):
    """A DTensor says that it has another shape than its elements make."""


def full_of(value: torch.Tensor) -> torch.Tensor:
    """The full tensor; what is no DTensor is whole. `ShapesDisagree` is raised where a DTensor has another shape than that.

    Where the numbers of elements differ, too, nothing is raised: the full tensor then is none that one device has.
    """
    if not isinstance(value, DTensor):
        return value
    full: torch.Tensor = value.full_tensor()
    if full.shape != value.shape and full.numel() == value.numel():
        raise ShapesDisagree(f"a DTensor of shape {tuple(value.shape)} has shape {tuple(full.shape)} in full_tensor()")
    return full


class PartsDisagree(EquivCheckError):
    """A DTensor has another shape or dtype than one device's tensor, or a rank's part another shape than placements say."""


def require_parts(value: torch.Tensor, expected: torch.Tensor, coordinate: Sequence[int]) -> None:
    """Raise `PartsDisagree` where the part of the rank at a coordinate of the mesh is not what placements leave it.

    So, too, where shape or dtype of the whole are not those that are expected. Reading the full tensor would fail on some ranks
    alone, or say nothing of the operation that is to blame.
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
    """The dtype and the shape, as ``float64 of shape (2, 3)``."""
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
