"""`fully_shard` with one rank along the axis of shards divides gradients by its divide factor twice.

Once in place of the reduce-scatter, which one rank does not need, and once more after it, where sums are divided.

    torchrun --standalone --nproc-per-node 1 fsdp2_one_shard_divided_twice.py

Exit code 1 when the difference shows. Seen on torch 2.10 to 2.15, CPU, gloo; not on 2.9.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FACTOR = 4.0


def main() -> int:
    """Compare the gradient of a sum with one over the factor."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_gradient_divide_factor(FACTOR)
    model.set_force_sum_reduction_for_comms(True)
    model(torch.ones(1, 1)).sum().backward()

    gradient, expected = float(model.weight.grad.full_tensor()), 1 / FACTOR
    print(f"gradient {gradient}, expected {expected}")
    print("max difference", abs(gradient - expected))
    dist.destroy_process_group()
    return int(gradient != expected)


if __name__ == "__main__":
    sys.exit(main())
