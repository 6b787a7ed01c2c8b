"""`fully_shard` by columns refuses an uneven cut on the tensor-parallel ranks that have one, while the others wait for them.

Tensor parallelism cuts the only column over two ranks: the second holds none, which `shard_placement_fn` takes for an even cut.

    torchrun --standalone --nproc-per-node 4 fsdp2_refuses_columns_of_some_ranks.py

Exit code 1 when some ranks alone are refused. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> int:
    """Wrap a linear with one input, row-parallel over two ranks, and count the ranks that are refused."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = parallelize_module(nn.Linear(1, 1, bias=False), mesh["tp"], RowwiseParallel())
    text = ""
    try:
        fully_shard(linear, mesh=mesh["dp"], shard_placement_fn=lambda _parameter: Shard(1))
    except NotImplementedError as error:
        text = str(error)
    texts = ["" for _ in range(4)]
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        print("\n".join(f"rank {rank}: {text or 'not refused'}" for rank, text in enumerate(texts)))
    dist.destroy_process_group()
    return int(any(texts) and not all(texts))


if __name__ == "__main__":
    sys.exit(main())
