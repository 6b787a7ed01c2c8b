"""`stage_backward_input` finds weights by way of the stage's input, which needs no gradient here. Only chunks whose input and
weight gradients are computed separately lose theirs.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV


def main() -> float:
    """Train four pipeline stages, the first one frozen, and compare the gradient of the second with one device."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    layers[0].requires_grad_(False)
    inputs, targets = torch.randn(4, 2), torch.randn(4, 2)
    loss = nn.MSELoss(reduction="sum")
    loss(layers(inputs), targets).backward()
    expected = layers[1].weight.grad
    layers.zero_grad()

    stages = [PipelineStage(layers[number], number, 4, torch.device("cpu")) for number in (rank, 3 - rank)]
    schedule = ScheduleDualPipeV(stages, 4, loss_fn=loss, scale_grads=False)
    schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == 0 else None)

    actual = layers[1].weight.grad
    difference = torch.zeros(()) if rank == 0 else (expected - (0 if actual is None else actual)).abs().max()
    dist.all_reduce(difference)
    return float(difference)
