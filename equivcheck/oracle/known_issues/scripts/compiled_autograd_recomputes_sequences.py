"""Compiled autograd cannot go back through a linear of DTensor sequences that is computed once more in the backward pass.

A linear of three dims is computed as one of two and viewed. The graph that recomputes it returns that view, which is made anew by
`as_strided`, and DTensor refuses that. With rows instead of sequences, eager autograd, or nothing recomputed, it does not happen.

    torchrun --standalone --nproc-per-node 1 compiled_autograd_recomputes_sequences.py

Exit code 1 when it fails. Seen on torch 2.13, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint


def main() -> int:
    """Compute the gradient of a weight, once with eager autograd and once with compiled."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]).requires_grad_()

    def linear(inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(DTensor.from_local(inputs, mesh, [Replicate()]), weight).to_local()

    def loss() -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(linear, torch.ones(2, 2, 2), use_reentrant=False)
        return outputs.square().sum()

    loss().backward()
    failed = 0
    try:
        found = loss()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            found.backward()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: RuntimeError: {str(error).splitlines()[0]}", flush=True)
        failed = 1
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
