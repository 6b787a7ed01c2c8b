"""The checkpoint saves the DTensor's mesh among its tensors. It works without `torch.compile`, without checkpointing, or if
attention is computed by matmul and softmax.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint


def main() -> None:
    """Run attention on DTensors with activation checkpointing, first in eager mode, then compiled."""
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))

    def attention(inputs: torch.Tensor) -> torch.Tensor:
        values = nn.functional.linear(DTensor.from_local(inputs, mesh, [Replicate()]), weight).to_local()
        return nn.functional.scaled_dot_product_attention(values, values, values)

    def recomputed(inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(attention, inputs, use_reentrant=False)
        return outputs

    recomputed(torch.ones(1, 1, 2, 2)).sum().backward()
    torch.compile(recomputed, backend="aot_eager")(torch.ones(1, 1, 2, 2)).sum().backward()
