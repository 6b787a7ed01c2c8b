"""It asks for norms in float32, and `torch.linalg.vector_norm` refuses to narrow. A rank without gradients goes on to the
all-reduce and waits.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> None:
    """Clip the gradient for a model with one weight, which only rank 0 holds."""
    linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model = FullyShardedDataParallel(linear, device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    print("norm", float(model.clip_grad_norm_(1.0)))
