"""DTensor averages the means of the ranks, and the mean of an empty shard is 0 / 0."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> float:
    """Compare the mean of a plain tensor with the mean of a DTensor that has an empty shard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    whole = torch.arange(float(dist.get_world_size() - 1))
    expected = whole.mean()
    found = distribute_tensor(whole, mesh, [Shard(0)]).mean().full_tensor()
    if dist.get_rank() == 0:
        print("one device:", expected.item(), "sharded:", found.item())
    return (found - expected).abs().item()
