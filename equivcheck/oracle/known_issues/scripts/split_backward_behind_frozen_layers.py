"""`stage_backward_input` finds weights by way of the stage's input, which needs no gradient here. Only the first stage is
treated separately.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


def main() -> float:
    """Train two pipeline stages, the first one frozen, and compare the gradient of the second with one device."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)]
    inputs, targets = torch.randn(4, 2), torch.randn(4, 2)
    loss = nn.MSELoss(reduction="sum")
    loss(layers[1](layers[0](inputs)), targets).backward()
    expected, layers[1].weight.grad = layers[1].weight.grad, None

    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=loss, scale_grads=False)
    schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == 1 else None)

    actual = layers[1].weight.grad
    difference = torch.zeros(()) if rank == 0 else (expected - (0 if actual is None else actual)).abs().max()
    dist.all_reduce(difference)
    return float(difference)
