"""The mean of the squares is a `Partial(avg)`, and the epsilon is added to it in place. `layer_norm` works."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import layer_norm, rms_norm


def main() -> None:
    """Normalise rows whose features are sharded over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(1)])
    print("layer_norm", layer_norm(inputs, (4,)).placements)
    print("rms_norm", rms_norm(inputs, (4,)).placements)
