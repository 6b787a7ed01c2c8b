"""Both modules are in one unit, as the documentation asks. FSDP1 flattens the DTensor's local tensor and gives one of the
modules a new DTensor in each forward, so the gradient of one of the two uses is lost.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def tied() -> nn.Sequential:
    """An embedding and a head with one weight."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight = nn.Parameter(torch.ones(4, 2))
    return model


def total(model: nn.Module) -> float:
    """Return the sum over all gradients on all ranks."""
    sums = [parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None]
    found = torch.stack([each.full_tensor() if hasattr(each, "full_tensor") else each for each in sums]).sum()
    dist.all_reduce(found)
    return float(found)


def main() -> float:
    """Compare the shared weight's gradient with the one in a plain model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, inner = tied(), tied()
    parallelize_module(
        inner, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(use_local_output=True)}
    )
    inner[1].weight = inner[0].weight  # parallelize_module untied them
    sharded = FullyShardedDataParallel(inner, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True)
    for model in (plain, sharded):
        model(torch.tensor([[0, 1, 1]])).sum().backward()

    expected, found = total(plain) / 2, total(sharded)
    if dist.get_rank() == 0:
        print("sum of the gradient:", expected, "and, sharded,", found)
    return abs(found - expected)
