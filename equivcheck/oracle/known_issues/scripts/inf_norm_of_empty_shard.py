"""The gradient has fewer rows than ranks, which `fully_shard` allows. All other norms work. The other ranks wait."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Clip the gradient of a weight of one row on two ranks."""
    model = nn.Linear(2, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.ones(1, 2)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    print("norm", float(norm.full_tensor()))
