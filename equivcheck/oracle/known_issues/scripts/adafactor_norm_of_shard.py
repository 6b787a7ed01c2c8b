"""Adafactor updates a sharded DTensor by the norm of each rank's own shard: `DTensor.item()` reduces nothing.

Its step is scaled by the norms of parameter and update, which it reads by `.item()`. Reported of `item()` as
https://github.com/pytorch/pytorch/issues/144054.

    torchrun --standalone --nproc-per-node 2 adafactor_norm_of_shard.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def step(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The parameter after one step."""
    parameter = torch.nn.Parameter(parameter)
    parameter.grad = gradient
    torch.optim.Adafactor([parameter], lr=0.1, foreach=False).step()
    return parameter.detach()


def main() -> int:
    """Compare the step of a sharded vector with that of a whole one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(1.0, 5.0)
    whole = step(values.clone(), torch.ones(4))
    shards = step(*(distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (values, torch.ones(4)))).full_tensor()

    difference = float((shards - whole).abs().max())
    if dist.get_rank() == 0:
        print("whole:  ", whole.tolist())
        print("sharded:", shards.tolist())
        print("max difference", difference)
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
