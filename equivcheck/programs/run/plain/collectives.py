"""Changes of placement along one mesh axis, as differentiable functional collectives on plain tensors.

A replicated tensor has partial sums as its gradient, a partial tensor a replicated one, and a shard a shard. So the derivative of
each change is the opposite change, and operations on shards and replicated tensors need no change. Results are contiguous as on
one device, because fused updates ignore strides (known issue `fused_updates_by_memory`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

# Private module, but the only one with differentiable collectives; tried on torch 2.9 to 2.15.
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from equivcheck.programs.run.values import chunk
from equivcheck.system.torch_version import is_torch_in

SUM_HAS_DERIVATIVE = ">=2.11"
"""Versions whose functional `all_reduce` has a derivative. Earlier versions pass the gradient unchanged."""


def lengths(extent: int, size: int) -> list[int]:
    """Return the sizes of all shards if a dim of size `extent` is split over `size` ranks, with empty shards at the end.

    The rule is that of `torch.chunk`.
    """
    length = -(-extent // size)
    return [max(0, min(length, extent - index * length)) for index in range(size)]


class Collectives:
    """Collectives along one mesh axis. They change the placement of plain tensors along this axis."""

    def __init__(self, mesh: DeviceMesh, axis: int) -> None:
        self.group: Any = (mesh, axis)
        self.size, self.index = mesh.size(axis), mesh.get_local_rank(axis)
        self.name = (mesh.mesh_dim_names or ())[axis]

    def all_gather(self, part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """Gather shards along `dim` into a replicated tensor. `extent` is the full size of the dim."""
        longest, rows = -(-extent // self.size), part.movedim(dim, 0)
        padded = _padded(rows, longest)
        gathered = self.gather(padded)
        parts = [gathered.narrow(0, rank * longest, length) for rank, length in enumerate(lengths(extent, self.size))]
        return torch.cat(parts).movedim(0, dim).contiguous()

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum partial values over ranks into a replicated tensor."""
        return self.sum(partial.contiguous())

    def reduce_scatter(self, partial: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum partial values over ranks, and shard the result along `dim`."""
        extent = partial.shape[dim]
        longest, rows = -(-extent // self.size), partial.movedim(dim, 0)
        pieces = [_padded(chunk(rows, self.size, rank, 0), longest) for rank in range(self.size)]
        reduced = self.sum_parts(torch.cat(pieces))
        return reduced.narrow(0, 0, lengths(extent, self.size)[self.index]).movedim(0, dim).contiguous()

    def all_to_all(self, part: torch.Tensor, source: int, extent: int, target: int) -> torch.Tensor:
        """Exchange shards, so that dim `target` is sharded instead of dim `source`. `extent` is the full size of `source`."""
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

    def shard(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of a replicated tensor along `dim`, without communication."""
        return chunk(self.as_varying(whole), self.size, self.index, dim).clone()

    def to_partial(self, whole: torch.Tensor) -> torch.Tensor:
        """Turn a replicated tensor into partial values: the first rank keeps the value, and all other ranks get zeros."""
        return whole * float(self.index == 0)

    def shard_to_partial(self, part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """Turn shards along `dim` into partial values: each rank puts zeros outside its shard.

        `extent` is the full size of the dim.
        """
        before = sum(lengths(extent, self.size)[: self.index])
        sizes = before, extent - before - part.shape[dim]
        zeros = [part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :])) for size in sizes]
        return self.as_partial(torch.cat([zeros[0], part, zeros[1]], dim))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows from all ranks along dim 0. All ranks must have equally many rows."""
        return _waited(functional.all_gather_tensor_autograd(rows, 0, self.group))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over ranks. The backward pass also sums the gradients over ranks."""
        if is_torch_in(SUM_HAS_DERIVATIVE):
            return sum_over_group(partial, self.group)
        found: torch.Tensor = Sum.apply(partial, self.group)  # type: ignore[no-untyped-call]
        return found

    def sum_parts(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over ranks, and return this rank's rows of the sum. Rows along dim 0 are divided equally among ranks."""
        return _waited(functional.reduce_scatter_tensor_autograd(partial, "sum", 0, self.group))

    def exchange(self, sent: torch.Tensor, sizes: list[int], received: list[int], largest: int) -> torch.Tensor:  # noqa: ARG002
        """Send ``sizes[rank]`` elements to each rank, and receive ``received[rank]`` elements from it.

        No rank sends more than `largest` elements to another rank.
        """
        return _waited(functional.all_to_all_single_autograd(sent, received, sizes, self.group))

    def as_varying(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a replicated tensor unchanged, before each rank takes a different part.

        A subclass also marks the tensor as varying, for the type checker of the package spmd_types.
        """
        return whole

    def as_partial(self, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's tensor unchanged, to be used as a partial value.

        A subclass also marks the tensor as partial, for the type checker of the package spmd_types.
        """
        return part


class Sum(torch.autograd.Function):
    """Sum over ranks. The backward pass also sums the gradients over ranks. torch's own collective does so since 2.11."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum a tensor over the ranks in `group`."""
        ctx.group = group
        return sum_over_group(partial, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sum the gradient over the ranks in the group."""
        return sum_over_group(gradients[0].contiguous(), ctx.group), None


def sum_over_group(partial: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum a tensor over the ranks in `group`."""
    return _waited(functional.all_reduce(partial, "sum", group))


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    missing = rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))
    return torch.cat([rows, missing]).contiguous()


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    wait: Any = functional.wait_tensor
    waited: torch.Tensor = wait(tensor)
    return waited
