"""Parameters of which some are DTensors and some are not can neither be clipped by norm together nor updated by foreach.

A model whose last linear is left out of the tensor-parallel plan has such parameters. `clip_grad_norm_` and the foreach
implementation of AdamW hand all of them to one operator, which refuses the mixture.

    torchrun --standalone --nproc-per-node 2 mixed_plain_and_dtensor.py

Exit code 1 when both raise. Seen on torch 2.13, CPU, gloo.
"""

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def raises(name: str, action: Callable[[], object]) -> bool:
    """Whether an action is refused."""
    try:
        action()
    except RuntimeError as error:
        print(f"{name}: {error}")
        return True
    print(f"{name}: works")
    return False


def main() -> int:
    """Train three linears of which the last is whole on every rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.ones(2, 2)).sum().backward()

    clipping = raises("clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    update = raises("foreach AdamW", torch.optim.AdamW(model.parameters(), foreach=True).step)
    dist.barrier()
    dist.destroy_process_group()
    return int(clipping and update)


if __name__ == "__main__":
    sys.exit(main())
