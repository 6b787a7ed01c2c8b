"""Changes of placement along one axis of a mesh, as functional collectives of torch on plain tensors, with derivatives.

The gradient of what is replicated is addends of a sum, that of addends is replicated, that of a part is the same part: so each
change has the opposite one as its derivative, and an operation on parts and replicated tensors needs none. What results is
contiguous, as on one device: fused updates go through memory, whatever the strides (known issue `fused_updates_by_memory`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.programs.run.values import chunk
from equivcheck.system.torch_version import torch_in

SUM_HAS_DERIVATIVE = ">=2.11"
"""Versions whose functional `all_reduce` has one; earlier ones hand a gradient on as it is."""


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
        gathered = self.gather(padded)
        parts = [gathered.narrow(0, rank * longest, length) for rank, length in enumerate(lengths(extent, self.size))]
        return torch.cat(parts).movedim(0, dim).contiguous()

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        """From addends of a sum to the sum on each rank."""
        return self.sum(addend.contiguous())

    def reduce_scatter(self, addend: torch.Tensor, dim: int) -> torch.Tensor:
        """From addends of a sum to parts of it along a dim."""
        extent = addend.shape[dim]
        longest, rows = -(-extent // self.size), addend.movedim(dim, 0)
        pieces = [_padded(chunk(rows, self.size, rank, 0), longest) for rank in range(self.size)]
        reduced = self.sum_parts(torch.cat(pieces))
        return reduced.narrow(0, 0, lengths(extent, self.size)[self.index]).movedim(0, dim).contiguous()

    def all_to_all(self, part: torch.Tensor, source: int, extent: int, target: int) -> torch.Tensor:
        """From parts along the dim `source`, of `extent`, to parts along another."""
        pieces = [chunk(part, self.size, rank, target) for rank in range(self.size)]
        own = pieces[self.index].shape
        shapes = [(*own[:source], length, *own[source + 1 :]) for length in lengths(extent, self.size)]
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        longest = lengths(extent, self.size)[0], lengths(part.shape[target], self.size)[0]
        largest = prod({**dict(enumerate(part.shape)), source: longest[0], target: longest[1]}.values())
        received = self.exchange(sent, [piece.numel() for piece in pieces], sizes, largest)
        parts = [each.view(shape) for each, shape in zip(torch.split(received, sizes), shapes, strict=True)]
        return torch.cat(parts, source)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """From what is replicated to parts along a dim, without communication."""
        return chunk(self.own(whole), self.size, self.index, dim).clone()

    def addend(self, whole: torch.Tensor) -> torch.Tensor:
        """From what is replicated to addends: that of the first rank is all of it."""
        return whole * float(self.index == 0)

    def spread(self, part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """From parts along a dim to addends, without communication: zero but for the part."""
        before = sum(lengths(extent, self.size)[: self.index])
        sizes = before, extent - before - part.shape[dim]
        zeros = [part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :])) for size in sizes]
        return self.pending(torch.cat([zeros[0], part, zeros[1]], dim))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Equally many rows of each rank, one after the other."""
        return _waited(functional.all_gather_tensor_autograd(rows, 0, self.group))

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """Of all ranks' addends."""
        if torch_in(SUM_HAS_DERIVATIVE):
            return summed(addend, self.group)
        found: torch.Tensor = Sum.apply(addend, self.group)  # type: ignore[no-untyped-call]
        return found

    def sum_parts(self, addend: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum; each has equally many."""
        return _waited(functional.reduce_scatter_tensor_autograd(addend, "sum", 0, self.group))

    def exchange(self, sent: torch.Tensor, sizes: list[int], received: list[int], largest: int) -> torch.Tensor:  # noqa: ARG002
        """So many elements to each rank, and so many from each; no rank sends more than the largest to another."""
        return _waited(functional.all_to_all_single_autograd(sent, received, sizes, self.group))

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """What is replicated as what this rank goes its own way with."""
        return whole

    def pending(self, part: torch.Tensor) -> torch.Tensor:
        """What a rank has computed as an addend."""
        return part


class Sum(torch.autograd.Function):
    """A sum over ranks whose derivative is the sum of what ranks have of the gradient, as torch has it from 2.11 on."""

    @staticmethod
    def forward(ctx: Any, addend: torch.Tensor, group: Any) -> torch.Tensor:
        """The sum."""
        ctx.group = group
        return summed(addend, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient that each addend has."""
        return summed(gradients[0].contiguous(), ctx.group), None


def summed(addend: torch.Tensor, group: Any) -> torch.Tensor:
    """Of all ranks' addends."""
    return _waited(functional.all_reduce(addend, "sum", group))


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    missing = rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))
    return torch.cat([rows, missing]).contiguous()


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    wait: Any = functional.wait_tensor
    waited: torch.Tensor = wait(tensor)
    return waited
