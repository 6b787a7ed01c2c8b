"""`stage_backward_weight` runs backward once for each group of parameters. The group between the two uses runs through the
later use and frees its saved tensors.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


class Twice(nn.Module):
    """Apply one linear before and after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 2) to (rows, 2)."""
        return self.linear(self.norm(self.linear(inputs)))


def main() -> None:
    """Run one step of a pipeline with two stages that use their weight twice."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    rank = dist.get_rank()
    stage = PipelineStage(Twice(), rank, 2, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=nn.MSELoss())
    schedule.step(*([torch.ones(2, 2)] if rank == 0 else []), target=torch.ones(2, 2) if rank == 1 else None)
