"""A rank without gradients uses a zero tensor that the module keeps. The all-reduce writes the total into this tensor, and in
the next step the rank contributes the old total, which wins if norms fall.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> float:
    """Clip twice by the infinity norm, with gradients 4 and 1 for a weight that only rank 0 holds."""
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=True)

    expected, norms = [4.0, 1.0], []
    for value in expected:
        model.zero_grad()
        model(torch.full((1, 1), value)).sum().backward()
        norms.append(float(model.clip_grad_norm_(100.0, norm_type=float("inf"))))

    difference = max(abs(norm - right) for norm, right in zip(norms, expected, strict=True))
    if dist.get_rank() == 0:
        print("expected norms", expected, "got", norms)
    return difference
