"""`stage_backward_weight` runs backward from each place at which a parameter meets the path to the stage's input. A shared
weight meets the path twice, so the gradient of the later use is counted twice.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


class Twice(nn.Module):
    """Apply one linear twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.linear.weight, 0.75)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 2) to (rows, 2)."""
        return self.linear(self.linear(inputs))


def expected() -> torch.Tensor:
    """Compute on one device the gradient of the second stage's weight."""
    first, second = Twice(), Twice()
    nn.functional.mse_loss(second(first(torch.ones(2, 2))), torch.ones(2, 2)).backward()
    assert second.linear.weight.grad is not None
    return second.linear.weight.grad


def main() -> float:
    """Run one step with two stages and one microbatch, and compare the second stage's gradient."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    rank = dist.get_rank()
    module = Twice()
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=nn.MSELoss())
    schedule.step(*([torch.ones(2, 2)] if rank == 0 else []), target=torch.ones(2, 2) if rank == 1 else None)
    found = module.linear.weight.grad
    if rank == 0:
        return 0.0
    assert found is not None
    print(f"gradient {found.tolist()}, expected {expected().tolist()}")
    return (found - expected()).abs().max().item()
