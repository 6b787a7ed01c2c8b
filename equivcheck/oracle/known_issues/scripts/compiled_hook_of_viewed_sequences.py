"""A compiled FSDP1 without `use_orig_params` raises at another number of rows where a linear with a bias gives sequences.

The output, a DTensor, is a view of one of shape (rows x length, features), and Dynamo compiles the hook that takes it. With
rows as a symbol, the length by which it has been viewed becomes one as well, which has no source.

    torchrun --standalone --nproc-per-node 1 compiled_hook_of_viewed_sequences.py

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
    """Compute the outputs of three sequences, and then of four."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(2, 8)), mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    compiled = torch.compile(unit, backend="aot_eager")
    failed = 0
    try:
        for rows in (3, 4):
            print("outputs of shape", tuple(compiled(torch.ones(rows, 2, 2)).shape))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        failed = 1
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
