"""`stage_backward_input` detaches the stage's output in place. The issue reports another place that does so."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


class Flattened(nn.Module):
    """A linear whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 2) to (rows, 2)."""
        return self.linear(inputs).view(-1, 2)


def main() -> None:
    """Run one step of a pipeline with three stages whose outputs are views."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    rank = dist.get_rank()
    stage = PipelineStage(Flattened(), rank, 3, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble([stage], 3, loss_fn=nn.MSELoss())
    schedule.step(*([torch.ones(3, 2)] if rank == 0 else []), target=torch.ones(3, 2) if rank == 2 else None)
