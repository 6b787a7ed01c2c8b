"""The embedding is sharded by tokens. With five tokens on four ranks, the last rank holds no row and fails at the lookup, before
the sum over ranks in which the others wait. (With three tokens on four ranks, DTensor gathers the rows first.)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def main() -> None:
    """Look up a token in an embedding that is sharded by tokens and has no row on the last rank."""
    mesh = init_device_mesh("cpu", (4,))
    embedding = parallelize_module(nn.Embedding(5, 2), mesh, RowwiseParallel(input_layouts=Replicate()))
    print("rank", dist.get_rank(), "looked up", embedding(torch.tensor([0])))
