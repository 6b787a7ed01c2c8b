"""`fully_shard` on layers that share a weight leaves the gradient of one of them out.

Each layer is a unit of its own, and shards the weight for itself. Later versions raise in the first forward.

    torchrun --standalone --nproc-per-node 1 fsdp2_weight_in_two_units.py

Exit code 1 when the difference shows. Seen on torch 2.9 to 2.11, CPU, gloo; later versions raise in `fully_shard`.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def two_layers() -> nn.Sequential:
    """Two linears with one weight, which is 2."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[0].weight
    nn.init.constant_(model[0].weight, 2.0)
    return model


def main() -> int:
    """Compare the gradient with that of a model that is not sharded."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model, plain = two_layers(), two_layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain(torch.ones(1, 1)).sum().backward()
    try:
        model(torch.ones(1, 1)).sum().backward()
    except ValueError as error:
        print("forward raised:", error)
        return 0

    gradient, expected = float(model[0].weight.grad.full_tensor()), float(plain[0].weight.grad)
    print(f"gradient {gradient}, expected {expected}")
    print("max difference", abs(gradient - expected))
    dist.destroy_process_group()
    return int(gradient != expected)


if __name__ == "__main__":
    sys.exit(main())
