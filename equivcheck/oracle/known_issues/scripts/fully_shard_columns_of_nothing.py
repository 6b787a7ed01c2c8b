"""Tensor parallelism leaves this rank a shard with no rows and one column. If `fully_shard` then shards it by columns over one
rank, the shard has no rows and no columns.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> bool:
    """Wrap a linear with one output, column-parallel over two ranks, and count the ranks that cannot gather it."""
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
    return any(texts) and not all(texts)
