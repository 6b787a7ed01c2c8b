"""Explicit gradient reductions after a step's last backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def held_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each parameter's gradient on this rank: the local shard of a DTensor, or the full plain tensor.

    Empty shards are left out.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if gradient.numel():
                yield gradient


def sum_gradients(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each gradient over a group, with one all-reduce for each gradient."""
    for gradient in held_gradients(parameters):
        dist.all_reduce(gradient, group=group)


def sum_flat_gradients(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum all gradients over a group with one all-reduce of a flat buffer."""
    gradients = list(held_gradients(parameters))
    if gradients:
        buffer = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(buffer, group=group)
        sums = torch.split(buffer, [gradient.numel() for gradient in gradients])
        for gradient, summed in zip(gradients, sums, strict=True):
            gradient.copy_(summed.view_as(gradient))


def divide_gradients(parameters: Iterable[torch.Tensor], number: int) -> None:
    """Divide each gradient by a number, in place."""
    for gradient in held_gradients(parameters):
        gradient.div_(number)
