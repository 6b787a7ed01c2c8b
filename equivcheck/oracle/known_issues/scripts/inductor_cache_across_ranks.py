"""The compiled code holds which part of a DTensor the rank takes. The cache key has the DTensor's mesh, placements, shape and
device, which are the same on all CPU ranks.
"""

import os
import tempfile

import torch
import torch._inductor.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def cut(values: DTensor) -> DTensor:
    """Shard the values by rows, so that this rank keeps its part."""
    return values.redistribute(placements=[Shard(0)])


def share(folder: str) -> None:
    """Make all ranks use rank 0's compile cache."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[0]


def main() -> float:
    """Compile the same function twice: first without a cache entry, then from the cache."""
    torch._inductor.config.cpp.vec_isa_ok = True  # skips a slow check of vector instructions, which this code does not use
    expected = torch.arange(4.0)
    values = distribute_tensor(expected, init_device_mesh("cpu", (2,)), [Replicate()])
    with tempfile.TemporaryDirectory() as folder:
        share(folder)
        for compiled in ("anew", "from the cache"):
            torch._dynamo.reset()
            difference = float((torch.compile(cut)(values).full_tensor() - expected).abs().max())
            if dist.get_rank() == 0:
                print(f"compiled {compiled}: difference {difference}")
            dist.barrier()  # no rank may delete the folder or recompile before all have compiled
    return difference
