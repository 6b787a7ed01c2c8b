"""How `fully_shard` reduces gradients and over which mesh, and what `ZeroRedundancyOptimizer` sends, replaced by others.

Private torch API; tried on torch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from equivcheck.system.torch_version import torch_in
from equivcheck.training.setup import Setup

Op = dist.ReduceOp | dist.ReduceOp.RedOpType

ONE_PARAM_GROUP = "<2.12"
"""Versions in which a module that `fully_shard` was applied to has at most one group of parameters."""


def fsdp_modules(setup: Setup) -> Iterator[FSDPModule]:
    """The modules that `fully_shard` was applied to."""
    return (module for module in setup.model.modules() if isinstance(module, FSDPModule))


def scatter_by(setup: Setup, scatter: type[WrongReduceScatter]) -> None:
    """Let `fully_shard` reduce and scatter gradients otherwise; nothing where it is not applied."""
    for module in fsdp_modules(setup):
        module.set_custom_reduce_scatter(scatter())


def forget_replicas(module: FSDPModule, shards: DeviceMesh) -> None:
    """Let a module that has replicas reduce over its shards, and over nothing else."""
    for group in _param_groups(module):
        group.mesh_info = FSDPMeshInfo(shards, shard_mesh_dim=0)


def _param_groups(module: FSDPModule) -> Sequence[Any]:
    state: Any = module._get_fsdp_state()
    if torch_in(ONE_PARAM_GROUP):
        return (state._fsdp_param_group,) if state._fsdp_param_group is not None else ()
    groups: Sequence[Any] = state._fsdp_param_groups
    return groups


class WrongReduceScatter(ReduceScatter):
    """What is called in place of a reduce-scatter, at once."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of the size and element type that is asked for."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Op,
        async_op: bool = False,  # noqa: ARG002 - done at once
    ) -> None:
        """Write what arrives at this rank into the output."""
        self.scatter(output_tensor, input_tensor, group, op)

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """The same, by fewer arguments."""
        raise NotImplementedError


class TakeOwnChunk(WrongReduceScatter):
    """Hands over the rank's own chunk, scaled as a mean over ranks would be."""

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Copy it, without communication."""
        output.copy_(given.view(group.size(), -1)[group.rank()] * (1 if op == dist.ReduceOp.AVG else group.size()))


class TakeNextChunk(WrongReduceScatter):
    """Reduces rightly, but hands over the chunk of the next rank."""

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Reduce chunks that have moved on by one."""
        chunks = given.view(group.size(), -1).roll(-1, 0)
        dist.reduce_scatter_tensor(output, chunks.reshape(-1), op=op, group=group)


class ReduceInBfloat16(WrongReduceScatter):
    """Sums in bfloat16 what it is given in another element type."""

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Reduce what has been rounded."""
        low = output.to(torch.bfloat16)
        dist.reduce_scatter_tensor(low, given.to(torch.bfloat16), op=op, group=group)
        output.copy_(low)


def send_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Let ranks keep the parameters that they have updated for all; any other optimizer than that one is left alone."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer._sync_params = lambda: None  # type: ignore[attr-defined]
