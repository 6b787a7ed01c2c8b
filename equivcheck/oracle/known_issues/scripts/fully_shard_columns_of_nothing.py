"""`fully_shard` by columns fails on a rank that tensor parallelism leaves no row, while the others go on and wait for it.

The rank's part of no rows and one column, to be cut by columns for one rank, becomes one of no rows and no columns.

    torchrun --standalone --nproc-per-node 2 fully_shard_columns_of_nothing.py

Exit code 1 when one rank alone fails. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> int:
    """Wrap a linear with one output, column-parallel over two ranks, and count the ranks that cannot gather it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(1, 1, bias=False), mesh["tp"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["dp"], shard_placement_fn=lambda _parameter: Shard(1))
    text = ""
    try:
        linear.unshard()
    except AssertionError as error:
        text = str(error)
    texts = ["" for _ in range(2)]
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        print("\n".join(f"rank {rank}: {text or 'gathered'}" for rank, text in enumerate(texts)))
    dist.destroy_process_group()
    return int(any(texts) and not all(texts))


if __name__ == "__main__":
    sys.exit(main())
