"""DualPipeV computes some weight gradients in a separate pass, without accumulating into the parameters by autograd. DDP's hooks
do not run there, so the reduction that `find_unused_parameters=True` prepared stays unfinished, and the next step raises.
If gradients are None before that step, the error is about an undefined gradient instead.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Run two steps of four stages on two ranks, each stage in DDP over one rank, without the search and with it."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    rows = torch.ones(8, 2)
    sent = torch.ones(2, 2, requires_grad=True)
    for search in (False, True):
        stages = []
        for number in (rank, 3 - rank):
            module = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group(), find_unused_parameters=search)
            received = sent if number else sent.detach()
            stages.append(
                PipelineStage(module, number, 4, torch.device("cpu"), group=group, input_args=received, output_args=sent)
            )
        schedule = ScheduleDualPipeV(stages, 4, loss_fn=nn.MSELoss())
        for _ in range(2):
            schedule.step(*([rows] if rank == 0 else []), target=rows if rank == 0 else None)
        print("find_unused_parameters:", search)
