"""A linear with a bias returns a DTensor that is a view of shape (rows x length, features), and Dynamo compiles the hook that
takes it. Once the number of rows is a symbol, the length in the view is one, too, and has no source.
https://github.com/pytorch/pytorch/issues/152963 is similar.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Run a compiled FSDP1 unit with column-parallel linears on three sequences, then on four."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(2, 8)), mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    compiled = torch.compile(unit, backend="aot_eager")
    for rows in (3, 4):
        print("outputs of shape", tuple(compiled(torch.ones(rows, 2, 2)).shape))
