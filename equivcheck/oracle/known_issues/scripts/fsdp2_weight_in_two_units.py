"""Each layer is a unit and shards the weight separately. Later versions raise in the first forward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def two_layers() -> nn.Sequential:
    """Two linears with one weight, whose value is 2."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[0].weight
    nn.init.constant_(model[0].weight, 2.0)
    return model


def main() -> float:
    """Compare the shared weight's gradient with the one in an unsharded model."""
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
        return 0.0

    gradient, expected = float(model[0].weight.grad.full_tensor()), float(plain[0].weight.grad)
    print(f"gradient {gradient}, expected {expected}")
    return abs(gradient - expected)
