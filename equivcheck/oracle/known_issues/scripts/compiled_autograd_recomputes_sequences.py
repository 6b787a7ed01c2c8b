"""A linear on three dims runs on two and returns a view. The recomputed graph rebuilds this view by `as_strided`, which
DTensor refuses. It works with two dims, with eager autograd, or without checkpointing.
"""

import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint


def main() -> None:
    """Compute the gradient of a checkpointed linear, with eager and with compiled autograd."""
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]).requires_grad_()

    def linear(inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(DTensor.from_local(inputs, mesh, [Replicate()]), weight).to_local()

    def loss() -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(linear, torch.ones(2, 2, 2), use_reentrant=False)
        return outputs.square().sum()

    loss().backward()
    found = loss()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found.backward()
