"""A column-parallel linear returns a slice of a padded all-gather, if its ranks have unequal shards of the features. The strides
are those of the padding, but `PipelineStage` infers a contiguous output, and refuses the difference.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Run one stage on two tensor-parallel ranks, with an even and an odd number of output features."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    for features in (4, 3):
        linear = parallelize_module(nn.Linear(2, features), mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        stage = PipelineStage(linear, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
        ScheduleGPipe(stage, 1, loss_fn=nn.MSELoss()).step(torch.ones(2, 2), target=torch.ones(2, features))
        print("output features:", features)
