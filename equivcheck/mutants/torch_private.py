"""What `fully_shard` and `ZeroRedundancyOptimizer` keep to themselves: how they reduce, over which mesh, and what is sent.

Private torch API; tried on torch 2.13.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

__all__ = ["ReduceScatter", "forget_replicas", "send_nothing"]


def forget_replicas(module: FSDPModule, shards: DeviceMesh) -> None:
    """Let a module that has replicas reduce over its shards, and over nothing else."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.mesh_info = FSDPMeshInfo(shards, shard_mesh_dim=0)


def send_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Let ranks keep the parameters that they have updated for all; any other optimizer than that one is left alone."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer._sync_params = _nothing  # type: ignore[attr-defined]


def _nothing() -> None:
    """Do nothing."""
