"""A stage without given shapes infers them in the first step, by a forward and a backward through DDP. DDP then notes gradients
twice in its order, and refuses to rebuild its buckets in the next step. With `input_args` and `output_args` it is right.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Run two steps of two chunks on a stage that two ranks replicate."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    module = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group())
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    for _ in range(2):
        schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
