"""`full_tensor()` of a weight that `ColwiseParallel` cuts, and `fully_shard` once more, has zeros where parts are uneven.

The shards are right; put together they are taken to lie otherwise.
Mended in 2.10 by https://github.com/pytorch/pytorch/pull/163843.

    torchrun --standalone --nproc-per-node 4 full_tensor_of_uneven_strided_shards.py

Exit code 1 when the difference shows. Seen on torch 2.9, CPU, gloo; right on 2.10.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> int:
    """Compare a weight of six rows with what its shards on two by two ranks make."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(1, 6, bias=False)
    whole = torch.arange(6.0).reshape(6, 1)
    with torch.no_grad():
        model.weight.copy_(whole)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])

    found = model.weight.full_tensor()
    if dist.get_rank() == 0:
        print("whole:", whole.flatten().tolist(), "full_tensor():", found.flatten().tolist())
        print("max difference", (found - whole).abs().max().item())
    dist.barrier()
    dist.destroy_process_group()
    return int(not torch.equal(found, whole))


if __name__ == "__main__":
    sys.exit(main())
