"""`parallelize_module` makes frozen parameters trainable: the DTensors that it makes do not take over `requires_grad`.

Reported as https://github.com/pytorch/pytorch/issues/171523. `SequenceParallel` does so still.

    torchrun --standalone --nproc-per-node 1 tensor_parallel_unfreezes.py

Exit code 1 when the difference shows. Seen on torch 2.9, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> int:
    """Train for one step with a frozen linear and see whether it has moved."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    weight = model[0].weight
    before = weight.detach().to_local().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    difference = float((weight.detach().to_local() - before).abs().max())
    print("requires_grad, expected False:", weight.requires_grad)
    print("max difference", difference)
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
