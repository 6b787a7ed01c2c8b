"""DTensor caches an operation's sharding without the numbers among its arguments, but with the arguments that it
redistributed, such as the number of tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> None:
    """Compute gradients for sharded embeddings with four and with five tokens."""
    mesh = init_device_mesh("cpu", (2,))
    for tokens in (4, 5):
        embedding = parallelize_module(nn.Embedding(tokens, 1), mesh, RowwiseParallel(input_layouts=Replicate()))
        embedding(torch.zeros(4, 1, dtype=torch.long)).sum().backward()
        print("rank", dist.get_rank(), "gradient", tuple(embedding.weight.grad.shape), "of", tokens, "tokens")
