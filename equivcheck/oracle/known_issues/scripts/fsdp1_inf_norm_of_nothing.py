"""`FullyShardedDataParallel.clip_grad_norm_` with the infinity norm returns the norm of an earlier step.

A rank that holds no gradient takes as its norm a tensor of zero that the module keeps. The all-reduce writes the total
into that tensor, and at the next step the rank takes part with the old total, which wins whenever norms fall.

    torchrun --standalone --nproc-per-node 2 fsdp1_inf_norm_of_nothing.py

Exit code 1 when the difference shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> int:
    """Clip the gradients 4 and 1 of a model with one weight, which only rank 0 holds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=True)

    expected, norms = [4.0, 1.0], []
    for value in expected:
        model.zero_grad()
        model(torch.full((1, 1), value)).sum().backward()
        norms.append(float(model.clip_grad_norm_(100.0, norm_type=float("inf"))))

    difference = max(abs(norm - right) for norm, right in zip(norms, expected, strict=True))
    if dist.get_rank() == 0:
        print("expected norms", expected, "got", norms)
        print("max difference", difference)
    dist.barrier()
    dist.destroy_process_group()
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
