"""Dynamo makes the number of features symbolic, and AOTAutograd counts it among the outputs because the DTensor's size needs
it. Tracing turns it into the number two, so the output is missing and a result of backward is taken for one of forward.
Without gradients the compiled call raises.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def main() -> bool:
    """Shard four features over two ranks in compiled code, then two features."""
    mesh = init_device_mesh("cpu", (2,))

    def cut(inputs: torch.Tensor) -> DTensor:
        return DTensor.from_local(inputs, mesh, [Replicate()]).redistribute(placements=[Shard(-1)])

    failed = False
    for trained in (True, False):
        torch.compiler.reset()
        compiled = torch.compile(cut, backend="aot_eager")
        try:
            for features in (4, 2):
                found = compiled(torch.ones(2, features, requires_grad=trained)).to_local().shape
                print(f"rank {dist.get_rank()} has {tuple(found)} of {(2, features)}", flush=True)
        except Exception as error:
            print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)
            failed = True
    return failed
