"""Compiling what cuts two features over two ranks raises on the second one, where another number of features came before.

Dynamo makes a symbol of the features then, and AOTAutograd counts it among the outputs, for the size of the DTensor. Tracing the
second of two parts of one feature each makes it a number, two, of which there is no output: a result of backward is taken for one
of forward. Without gradients it raises when it is called.

    torchrun --standalone --nproc-per-node 2 dtensor_symbolic_size_becomes_number.py

Exit code 1 when it raises. Seen on torch 2.13, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def main() -> int:
    """Cut four features, and then two."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def cut(inputs: torch.Tensor) -> DTensor:
        return DTensor.from_local(inputs, mesh, [Replicate()]).redistribute(placements=[Shard(-1)])

    failed = 0
    for trained in (True, False):
        torch.compiler.reset()
        compiled = torch.compile(cut, backend="aot_eager")
        try:
            for features in (4, 2):
                found = compiled(torch.ones(2, features, requires_grad=trained)).to_local().shape
                print(f"rank {dist.get_rank()} has {tuple(found)} of {(2, features)}", flush=True)
        except Exception as error:
            print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)
            failed = 1
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
