"""An embedding whose rows are sharded raises on a rank that has none of them, while the others wait for it.

`RowwiseParallel` shards an embedding by tokens: of five on four ranks the last holds no row. It fails at the lookup, before
what was looked up is summed, and the others wait in that sum. (Of three tokens on four ranks DTensor gathers the rows first.)

    torchrun --standalone --nproc-per-node 4 embedding_of_no_rows.py

Exit code 1 when the error shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> int:
    """Look up one token."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    mesh = init_device_mesh("cpu", (4,))
    embedding = parallelize_module(nn.Embedding(5, 2), mesh, RowwiseParallel(input_layouts=Replicate()))
    found = 0
    try:
        print("rank", dist.get_rank(), "looked up", embedding(torch.tensor([0])))
    except RuntimeError as error:
        print("rank", dist.get_rank(), type(error).__name__, error)
        found = 1
    return found


if __name__ == "__main__":
    sys.exit(main())
