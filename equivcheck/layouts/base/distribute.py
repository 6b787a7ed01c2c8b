"""Parameters, gradients and batches as DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from equivcheck.scenario import Distribution
from equivcheck.training.material import Batch


def distribute_parameters(model: nn.Module, mesh: DeviceMesh, distribution: Distribution) -> None:
    """Replace each distinct parameter by a DTensor, in all modules with this parameter.

    `Distribution.FULLY_SHARD` shards dim 0. Scalars stay replicated.
    """
    is_sharded = distribution is Distribution.FULLY_SHARD
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                placement: Placement = Shard(0) if is_sharded and parameter.dim() else Replicate()
                distributed = distribute_tensor(parameter.detach(), mesh, [placement] * mesh.ndim)
                made[parameter] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[parameter])


def redistribute_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Register hooks to redistribute each gradient to its parameter's placements before accumulation.

    DTensor's propagation may leave a gradient partial or sharded along another dim. In-place operations on such a gradient fail.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(partial(_redistributed, parameter.placements))  # type: ignore[no-untyped-call]


def _redistributed(placements: tuple[Placement, ...], gradient: DTensor) -> DTensor:
    return gradient if gradient.placements == placements else gradient.redistribute(placements=placements)


def distribute_batch(batch: Batch, mesh: DeviceMesh) -> Batch:
    """Convert this rank's rows to DTensors sharded by rows. The rows become the rank's local shards, without communication."""
    inputs, targets = (_by_rows(values, mesh, batch.batch_dim) for values in (batch.inputs, batch.targets))
    masks = tuple(None if mask is None else _by_rows(mask, mesh, 0) for mask in batch.masks)
    return replace(batch, inputs=inputs, targets=targets, masks=masks)


def _by_rows(local: torch.Tensor, mesh: DeviceMesh, batch_dim: int) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(batch_dim)] * mesh.ndim, run_check=False)
