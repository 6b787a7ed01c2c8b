"""The new parameters do not take over `requires_grad`. The other styles and `distribute_module` had the same fault until
https://github.com/pytorch/pytorch/pull/171709.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module


def main() -> float:
    """Train one step with `SequenceParallel` on a frozen norm, and return how much the norm changed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    norm = nn.LayerNorm(4).requires_grad_(False)
    parallelize_module(norm, mesh, SequenceParallel(sequence_dim=0, use_local_output=True))
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    norm(torch.arange(8.0).reshape(2, 4).requires_grad_()).sum().backward()
    optimizer.step()

    difference = float(norm.bias.detach().to_local().abs().max())
    print("requires_grad, expected False:", norm.weight.requires_grad)
    return difference
