"""`PipelineStage` sends outputs as they are. Before torch 2.12 it refuses strides that it did not infer. Later versions pass a
tensor to gloo that is not contiguous. A column-parallel linear with unequal shards returns such a slice of a padded all-gather.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class Sliced(nn.Module):
    """A linear that returns only its first two output features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, features)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (rows, 2) to (rows, 2)."""
        return self.linear(inputs)[:, :2]


def main() -> None:
    """Run a pipeline with two stages whose outputs are contiguous, then one with outputs that are not."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    rank, rows = dist.get_rank(), torch.ones(4, 2)
    for features in (2, 3):
        stage = PipelineStage(Sliced(features), rank, 2, torch.device("cpu"))
        ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss()).step(*([rows] if rank == 0 else []), target=rows if rank else None)
        print("features computed:", features)
