"""Adafactor reads the norms of parameter and update with `DTensor.item()`, which does not reduce over ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def step(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the parameter after one step of Adafactor."""
    parameter = torch.nn.Parameter(parameter)
    parameter.grad = gradient
    torch.optim.Adafactor([parameter], lr=0.1, foreach=False).step()
    return parameter.detach()


def main() -> float:
    """Compare the step for a sharded vector with the step for a replicated one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(1.0, 5.0)
    whole = step(values.clone(), torch.ones(4))
    shards = step(*(distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (values, torch.ones(4)))).full_tensor()

    difference = float((shards - whole).abs().max())
    if dist.get_rank() == 0:
        print("whole:  ", whole.tolist())
        print("sharded:", shards.tolist())
    return difference
