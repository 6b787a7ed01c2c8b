"""DTensor averages the means of the ranks, and the mean of an empty shard is 0 / 0."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import mse_loss


def main() -> float:
    """Compare `mse_loss` on plain tensors with `mse_loss` on DTensors that have an empty shard."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    whole = torch.arange(1.0 * size + 1)
    expected = mse_loss(whole, torch.zeros_like(whole))
    values, zeros = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (whole, torch.zeros_like(whole)))
    found = mse_loss(values, zeros).full_tensor()
    if dist.get_rank() == 0:
        print("one device:", expected.item(), "sharded:", found.item())
    return abs(found - expected).item()
