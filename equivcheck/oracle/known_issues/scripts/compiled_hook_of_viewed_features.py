"""A linear with a bias returns a DTensor that is a view of shape (rows x length, features), and Dynamo compiles the hook that
takes it. The second number of features becomes a symbol, so the compiled code also runs for the next linear's output, and
fails. https://github.com/pytorch/pytorch/issues/152963 is similar.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Run a compiled FSDP1 unit with three column-parallel linears on four sequences."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    linears = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2), nn.Linear(2, 6, bias=False))
    model = parallelize_module(linears, mesh["tp"], {name: ColwiseParallel(output_layouts=Replicate()) for name in "012"})
    unit = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, device_mesh=mesh["dp"])
    print("outputs of shape", tuple(torch.compile(unit, backend="aot_eager")(torch.ones(4, 2, 2)).shape))
