"""A column-parallel linear followed by a row-parallel one raises where the features between them do not divide evenly.

Between the two, activations are local tensors, which do not say how large the whole is: the second takes its input to have ranks
times the local features. Reported as https://github.com/pytorch/pytorch/issues/150336; ``use_local_output=False`` goes around it.

    torchrun --standalone --nproc-per-node 2 uneven_local_activations.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> int:
    """Run two linears with three features between them on two ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    print("output", model(torch.ones(2, 2)).tolist())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
