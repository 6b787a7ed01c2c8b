"""`FullyShardedDataParallel.clip_grad_norm_` over tensor parallelism: each tensor-parallel rank has the norm of its own shards.

    torchrun --standalone --nproc-per-node 2 fsdp1_norm_over_tensor_parallel.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> int:
    """Norm of the gradient of a column-parallel linear, where rank 1's shard alone gets one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    linear = parallelize_module(nn.Linear(2, 2, bias=False), mesh["tp"], ColwiseParallel())
    model = FullyShardedDataParallel(linear, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
    (model(torch.ones(1, 2)) * (1.0 + dist.get_rank())).sum().backward()
    norm = float(model.clip_grad_norm_(1.0))

    expected = 10.0**0.5
    print("norm", norm, "expected", expected)
    print("max difference", abs(norm - expected))
    dist.destroy_process_group()
    return int(abs(norm - expected) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
