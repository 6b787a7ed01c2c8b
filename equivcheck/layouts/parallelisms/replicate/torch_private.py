"""Calls `replicate` and `replicate_with_fsdp` in the private `torch.distributed._composable`; tested with torch 2.13."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivcheck.layouts.parallelisms.ddp.apply import compress
from equivcheck.scenario import Replicate, Replicator, Wrapping
from equivcheck.training.layers.module import LayerModule


def replicate_model(model: nn.Module, parallelism: Replicate, mesh: DeviceMesh) -> None:
    """Add hooks to a model. The hooks average the model's gradients over the mesh."""
    if parallelism.implementation is Replicator.DDP:
        _replicate_with_ddp(model, parallelism, mesh)
    else:
        _replicate_with_fsdp(model, parallelism, mesh)


def synchronises_only(modules: Iterable[Any], last: bool) -> AbstractContextManager[object]:
    """Let replicated modules reduce gradients in the next backward if `last` is True, and not reduce them otherwise.

    This takes effect when the function is called. The returned context manager does nothing; callers use it in place of
    `no_sync()`.
    """
    for module in modules:
        module.set_requires_gradient_sync(last)
    return nullcontext()


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` inside a replicated model; None for any other model."""
    from torch.distributed._composable.replicate import DDP, replicate

    if not isinstance(model, DDP):
        return None
    wrapper: DistributedDataParallel = replicate.state(model)._ddp
    return wrapper


def _replicate_with_ddp(model: nn.Module, parallelism: Replicate, mesh: DeviceMesh) -> None:
    from torch.distributed._composable.replicate import replicate

    replicate(model, device_mesh=mesh, bucket_cap_mb=parallelism.bucket_cap_mb)
    compress(model, parallelism.compression, mesh)
    # Otherwise the first forward replaces DTensors by local tensors, but the optimizer needs these earlier.
    replicate.state(model).lazy_init()


def _replicate_with_fsdp(model: nn.Module, parallelism: Replicate, mesh: DeviceMesh) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    if parallelism.wrapping is Wrapping.PER_LAYER:
        for block in [module for module in model.modules() if isinstance(module, LayerModule)]:
            replicate(block, mesh=mesh)
    replicate(model, mesh=mesh)
