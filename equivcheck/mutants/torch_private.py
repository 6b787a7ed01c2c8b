"""Replaces the reduction in `fully_shard` and the broadcasts in `ZeroRedundancyOptimizer`.

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
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from equivcheck.layouts.base.dtensor_experts import expert_modules
from equivcheck.system.torch_version import is_torch_in
from equivcheck.training.setup import Setup

Op = dist.ReduceOp | dist.ReduceOp.RedOpType

ONE_PARAM_GROUP = "<2.12"
"""Torch versions with at most one parameter group per `fully_shard` module."""


def fsdp_modules(setup: Setup) -> Iterator[FSDPModule]:
    """Yield all modules to which `fully_shard` was applied. In a pipeline, these may be whole stages."""
    return (module for part in setup.parts for module in part.modules() if isinstance(module, FSDPModule))


def reduce_scatter_with(setup: Setup, scatter: type[WrongReduceScatter]) -> None:
    """Let each `fully_shard` module reduce gradients by `scatter`. Does nothing if there are no such modules."""
    for module in fsdp_modules(setup):
        for group in _param_groups(module):
            # As `set_custom_reduce_scatter` does, which refuses modules with several groups.
            group._reduce_scatter_comm = scatter()


def reduce_outside_experts_with(setup: Setup, scatter: WrongReduceScatter) -> None:
    """Let all `fully_shard` modules, except those of experts, reduce gradients by `scatter`."""
    experts: list[Any] = expert_modules(setup.model)
    for module in fsdp_modules(setup):
        if module not in experts:
            for group in _param_groups(module):
                group._reduce_scatter_comm = scatter


def reduce_experts_with(setup: Setup, scatter: WrongReduceScatter) -> None:
    """Let all parameter groups without replicas, which hold experts, reduce gradients by `scatter`."""
    for module in fsdp_modules(setup):
        for group in _param_groups(module):
            if not isinstance(group.mesh_info, HSDPMeshInfo):
                group._reduce_scatter_comm = scatter


def forget_replicas(module: FSDPModule, shards: DeviceMesh) -> None:
    """Let a `fully_shard` module reduce gradients over its shards only, although it has replicas."""
    replicated = [group for group in _param_groups(module) if isinstance(group.mesh_info, HSDPMeshInfo)]
    for group in replicated:
        # The reduction reads the mesh from here; `fully_shard` takes it only once, when it wraps.
        group.mesh_info = FSDPMeshInfo(shards, shard_mesh_dim=0)


def _param_groups(module: FSDPModule) -> Sequence[Any]:
    # `FSDPModule` has no public access to its parameter groups; the attribute was renamed in 2.12.
    state: Any = module._get_fsdp_state()
    if is_torch_in(ONE_PARAM_GROUP):
        return (state._fsdp_param_group,) if state._fsdp_param_group is not None else ()
    groups: Sequence[Any] = state._fsdp_param_groups
    return groups


class WrongReduceScatter(ReduceScatter):
    """Synchronous replacement for the reduce-scatter of `fully_shard`. Subclasses reduce wrongly."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a buffer for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Op,
        async_op: bool = False,  # noqa: ARG002 - done at once
    ) -> None:
        """Write this rank's chunk into the output."""
        self.scatter(output_tensor, input_tensor, group, op)

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Reduce-scatter `given` into `output`, in the wrong way that a subclass defines."""
        raise NotImplementedError


class TakeOwnChunk(WrongReduceScatter):
    """Bug: the reduce-scatter returns the rank's own unreduced chunk, scaled like a mean over ranks."""

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Copy this rank's own chunk without communication."""
        output.copy_(given.view(group.size(), -1)[group.rank()] * (1 if op == dist.ReduceOp.AVG else group.size()))


class TakeNextChunk(WrongReduceScatter):
    """Bug: the reduce-scatter reduces correctly, but returns the next rank's chunk."""

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Reduce-scatter chunks that are shifted by one rank."""
        chunks = given.view(group.size(), -1).roll(-1, 0)
        dist.reduce_scatter_tensor(output, chunks.reshape(-1), op=op, group=group)


class ReduceInBfloat16(WrongReduceScatter):
    """Bug: the reduce-scatter runs in bfloat16."""

    def scatter(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Op) -> None:
        """Round to bfloat16, reduce-scatter, and convert back."""
        low = output.to(torch.bfloat16)
        dist.reduce_scatter_tensor(low, given.to(torch.bfloat16), op=op, group=group)
        output.copy_(low)


def disable_broadcasts(optimizer: torch.optim.Optimizer) -> None:
    """Disable parameter broadcasts in a `ZeroRedundancyOptimizer`; other optimizers stay unchanged."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        # `step()` calls this method to broadcast updated parameters; there is no option to skip it.
        optimizer._sync_params = lambda: None  # type: ignore[attr-defined]
