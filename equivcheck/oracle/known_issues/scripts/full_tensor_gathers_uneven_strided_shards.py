"""`full_tensor()` of a weight that `ColwiseParallel` cuts, and `fully_shard` once more, may hang where parts are uneven.

Ranks gather parts of different sizes, since some leave out the padding.
Mended in 2.10 by https://github.com/pytorch/pytorch/pull/163843.

    torchrun --standalone --nproc-per-node 6 full_tensor_gathers_uneven_strided_shards.py

Exit code 1 when the error of a rank that waited in vain shows. Seen on torch 2.9, CPU, gloo; right on 2.10.
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
    """Put a weight of seven rows together from its shards on two by three ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(1, 7, bias=False)
    whole = torch.arange(7.0).reshape(7, 1)
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
