"""A model with a layer outside the tensor-parallel plan has such parameters. `clip_grad_norm_` and foreach AdamW pass all of
them to one operator, which refuses the mixture.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def raises(name: str, action: Callable[[], object]) -> bool:
    """Call `action`, and return whether it raised."""
    try:
        action()
    except RuntimeError as error:
        print(f"{name}: {error}")
        return True
    print(f"{name}: works")
    return False


def main() -> bool:
    """Clip gradients of DTensors and plain tensors together, and update both with foreach AdamW."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.ones(2, 2)).sum().backward()

    clipping = raises("clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    update = raises("foreach AdamW", torch.optim.AdamW(model.parameters(), foreach=True).step)
    return clipping and update
