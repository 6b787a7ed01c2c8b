"""Changes of placement along one axis of a mesh, as functional collectives of torch on plain tensors, with derivatives.

The gradient of what is replicated is addends of a sum, that of addends is replicated, that of a part is the same part: so each
change has the opposite one as its derivative, and an operation on parts and replicated tensors needs none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.program_run.values import chunk


def lengths(extent: int, size: int) -> list[int]:
    """Of the parts of a dim, as `torch.chunk` cuts it, empty ones at the end included."""
    length = -(-extent // size)
    return [max(0, min(length, extent - index * length)) for index in range(size)]


class Collectives:
    """The collectives of one axis."""

    def __init__(self, mesh: DeviceMesh, axis: int) -> None:
        self.group: Any = (mesh, axis)
        self.size, self.index = mesh.size(axis), mesh.get_local_rank(axis)
        self.name = (mesh.mesh_dim_names or ())[axis]

    def all_gather(self, part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """From parts along a dim of `extent` to the whole on each rank."""
        longest, rows = -(-extent // self.size), part.movedim(dim, 0)
        padded = _padded(rows, longest)
        gathered = _waited(functional.all_gather_tensor_autograd(padded, 0, self.group))
        parts = [gathered.narrow(0, rank * longest, length) for rank, length in enumerate(lengths(extent, self.size))]
        return torch.cat(parts).movedim(0, dim)

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        """From addends of a sum to the sum on each rank."""
        return _waited(functional.all_reduce(addend.contiguous(), "sum", self.group))

    def reduce_scatter(self, addend: torch.Tensor, dim: int) -> torch.Tensor:
        """From addends of a sum to parts of it along a dim."""
        extent = addend.shape[dim]
        longest, rows = -(-extent // self.size), addend.movedim(dim, 0)
        pieces = [_padded(chunk(rows, self.size, rank, 0), longest) for rank in range(self.size)]
        reduced = _waited(functional.reduce_scatter_tensor_autograd(torch.cat(pieces), "sum", 0, self.group))
        return reduced.narrow(0, 0, lengths(extent, self.size)[self.index]).movedim(0, dim)

    def all_to_all(self, part: torch.Tensor, source: int, extent: int, target: int) -> torch.Tensor:
        """From parts along the dim `source`, of `extent`, to parts along another."""
        pieces = [chunk(part, self.size, rank, target) for rank in range(self.size)]
        own = pieces[self.index].shape
        shapes = [(*own[:source], length, *own[source + 1 :]) for length in lengths(extent, self.size)]
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = functional.all_to_all_single_autograd(sent, sizes, [piece.numel() for piece in pieces], self.group)
        parts = [each.view(shape) for each, shape in zip(torch.split(_waited(received), sizes), shapes, strict=True)]
        return torch.cat(parts, source)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """From what is replicated to parts along a dim, without communication."""
        return chunk(whole, self.size, self.index, dim).clone()

    def addend(self, whole: torch.Tensor) -> torch.Tensor:
        """From what is replicated to addends: that of the first rank is all of it."""
        return whole * float(self.index == 0)

    def spread(self, part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """From parts along a dim to addends, without communication: zero but for the part."""
        before = sum(lengths(extent, self.size)[: self.index])
        sizes = before, extent - before - part.shape[dim]
        zeros = [part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :])) for size in sizes]
        return torch.cat([zeros[0], part, zeros[1]], dim)


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    missing = rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))
    return torch.cat([rows, missing]).contiguous()


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    wait: Any = functional.wait_tensor
    waited: torch.Tensor = wait(tensor)
    return waited
