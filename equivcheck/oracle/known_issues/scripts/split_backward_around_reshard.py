"""If FSDP2 stages reshard after forward, the second of two input-gradient passes in a row finds the full parameters. If another
chunk's forward reshards them before the weight-gradient pass, `stage_backward_weight` looks for them among the shards.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


def main() -> None:
    """Run four chunks in three stages per rank, each with FSDP2 over one rank, without resharding after forward and with it."""
    torch.set_default_dtype(torch.float64)  # torch 2.9 receives the next stage's first message, int64, in the default dtype
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    rows = torch.ones(4, 2)
    for reshard in (False, True):
        stages = []
        for number in (rank, rank + 2, rank + 4):
            module = fully_shard(nn.Linear(2, 2), mesh=mesh["dp"], reshard_after_forward=reshard)
            stages.append(PipelineStage(module, number, 6, torch.device("cpu"), group=mesh["pp"].get_group()))
        schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.MSELoss())
        schedule.step(*([rows] if rank == 0 else []), target=rows if rank == 1 else None)
        print("reshard_after_forward:", reshard)
