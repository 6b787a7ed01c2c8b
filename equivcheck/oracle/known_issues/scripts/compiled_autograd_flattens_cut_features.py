"""Compiled autograd copies each saved tensor to a fake tensor with symbolic sizes, and DTensor cannot flatten symbolic sizes
if a dim other than the first is sharded. Eager autograd and `torch.compile` can run it.
"""

import torch
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> None:
    """Square a flattened DTensor, once with eager autograd and once with compiled autograd."""
    mesh = init_device_mesh("cpu", (2,))
    values = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)]).requires_grad_()
    (values * 2).flatten().square().sum().full_tensor().backward()
    loss = (values * 2).flatten().square().sum().full_tensor()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
