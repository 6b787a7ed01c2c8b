"""A mesh of their own for experts under `fully_shard`.

Private torch API: `ShardPlacementResult` and `FSDPMeshInfo`; tested with torch 2.12 to 2.15. torchtitan imports them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

Placement = Callable[[torch.Tensor], Shard | None]
"""Argument `shard_placement_fn` that only chooses the sharded dim."""


def experts_over(
    mesh: DeviceMesh, experts: Collection[torch.Tensor], placement: Placement | None
) -> Callable[[torch.Tensor], Shard | ShardPlacementResult | None]:
    """Return a `shard_placement_fn` that shards experts over another mesh. `placement` chooses each parameter's sharded dim."""
    # One object for all experts, because torch refuses two for one group of ranks.
    mesh_info = FSDPMeshInfo(mesh, shard_mesh_dim=0)

    def place(parameter: torch.Tensor) -> Shard | ShardPlacementResult | None:
        dim = None if placement is None else placement(parameter)
        return ShardPlacementResult(placement=dim, mesh_info=mesh_info) if parameter in experts else dim

    return place
