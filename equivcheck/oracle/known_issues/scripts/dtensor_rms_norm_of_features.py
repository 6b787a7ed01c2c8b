"""`rms_norm` of a DTensor sharded along the features that it normalises raises; `layer_norm` does not.

The mean of the squares is a `Partial(avg)`, and the epsilon is added to it in place:
https://github.com/pytorch/pytorch/pull/197501.

    torchrun --standalone --nproc-per-node 2 dtensor_rms_norm_of_features.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import layer_norm, rms_norm


def main() -> int:
    """Normalise rows whose features are spread over the ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(1)])
    print("layer_norm", layer_norm(inputs, (4,)).placements)
    print("rms_norm", rms_norm(inputs, (4,)).placements)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
