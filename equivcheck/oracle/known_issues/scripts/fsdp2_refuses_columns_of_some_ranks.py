"""Tensor parallelism splits the only column over two ranks. The second rank holds none, which `shard_placement_fn` accepts as
an even split; the first refuses the uneven split.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> bool:
    """Wrap a linear with one input, row-parallel over two ranks, and check whether only some ranks raise."""
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
    return any(texts) and not all(texts)
