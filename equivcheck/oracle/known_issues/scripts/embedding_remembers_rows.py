"""The gradient of an embedding has as many rows as that of one before it, of other tokens and with results that lie alike.

DTensor keeps the sharding of an operation without its numbers, and with it the arguments that it redistributed: the number of
tokens among them.

    torchrun --standalone --nproc-per-node 2 embedding_remembers_rows.py

Exit code 1 when the error shows. Seen on torch 2.9 and 2.10, CPU, gloo.
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
    """Differentiate embeddings of four and of five tokens."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (2,))
    found = 0
    for tokens in (4, 5):
        embedding = parallelize_module(nn.Embedding(tokens, 1), mesh, RowwiseParallel(input_layouts=Replicate()))
        try:
            embedding(torch.zeros(4, 1, dtype=torch.long)).sum().backward()
            print("rank", dist.get_rank(), "gradient", tuple(embedding.weight.grad.shape), "of", tokens, "tokens")
        except RuntimeError as error:
            print("rank", dist.get_rank(), type(error).__name__, error)
            found = 1
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.exit(main())
