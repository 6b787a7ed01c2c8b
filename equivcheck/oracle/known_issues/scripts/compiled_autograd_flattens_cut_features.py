"""Compiled autograd cannot take in a flattened DTensor whose second dim is sharded, which eager autograd and torch.compile can.

It makes a copy without data of each tensor that the graph holds, with symbolic sizes, and DTensor cannot flatten those.

    torchrun --standalone --nproc-per-node 2 compiled_autograd_flattens_cut_features.py

Exit code 1 when it fails. Seen on torch 2.13, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> int:
    """Square a flattened DTensor, once with eager autograd and once with compiled."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    values = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)]).requires_grad_()
    (values * 2).flatten().square().sum().full_tensor().backward()
    failed = 0
    try:
        loss = (values * 2).flatten().square().sum().full_tensor()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
    except NotImplementedError as error:
        print(f"rank {dist.get_rank()}: {str(error).splitlines()[0]}", flush=True)
        failed = 1
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
