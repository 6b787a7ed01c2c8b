"""Ranks take each other's compiled code from the cache on disk, though which part of a DTensor a rank takes is in it.

The key of AOTAutograd's cache has a DTensor's mesh, placements, shape and device, which on CPU are the same on all ranks.

    torchrun --standalone --nproc-per-node 2 inductor_cache_across_ranks.py

Exit code 1 when a difference shows. Seen on torch 2.13, CPU, gloo.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch._inductor.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def cut(values: DTensor) -> DTensor:
    """Leave each rank its rows."""
    return values.redistribute(placements=[Shard(0)])


def share(folder: str) -> None:
    """Let all ranks keep what they compile in the folder of the first."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[0]


def main() -> int:
    """Compile the same twice: once anew, and once from the cache."""
    torch._inductor.config.cpp.vec_isa_ok = True  # nothing is vectorised here, so that need not be tried out
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    expected = torch.arange(4.0)
    values = distribute_tensor(expected, init_device_mesh("cpu", (2,)), [Replicate()])
    with tempfile.TemporaryDirectory() as folder:
        share(folder)
        for compiled in ("anew", "from the cache"):
            torch._dynamo.reset()
            difference = float((torch.compile(cut)(values).full_tensor() - expected).abs().max())
            if dist.get_rank() == 0:
                print(f"compiled {compiled}: max difference {difference}")
            dist.barrier()  # what both have compiled is in the cache, and nobody needs it any more
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
