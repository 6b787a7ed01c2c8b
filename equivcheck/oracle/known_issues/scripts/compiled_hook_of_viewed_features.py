"""A compiled FSDP1 without `use_orig_params` raises where a linear with a bias gives sequences between linears without.

The output, a DTensor, is a view of one of shape (rows x length, features), and Dynamo compiles the hook that takes it. As this
is the second number of features, it becomes a symbol; what is compiled is run for the output of the next linear too, and fails.

    torchrun --standalone --nproc-per-node 1 compiled_hook_of_viewed_features.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> int:
    """Compute the outputs of four sequences of two positions."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    linears = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2), nn.Linear(2, 6, bias=False))
    model = parallelize_module(linears, mesh["tp"], {name: ColwiseParallel(output_layouts=Replicate()) for name in "012"})
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    failed = 0
    try:
        print("outputs of shape", tuple(torch.compile(unit, backend="aot_eager")(torch.ones(4, 2, 2)).shape))
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
        failed = 1
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
