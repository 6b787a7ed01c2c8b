"""A compiled checkpoint around `scaled_dot_product_attention` and DTensors saves their mesh among tensors, and fails.

Without one of the three it does not: not compiled, nothing recomputed, or attention computed by matmul and softmax.

    torchrun --standalone --nproc-per-node 1 compiled_checkpoint_saves_mesh.py

Exit code 1 when it fails. Seen on torch 2.13, CPU, gloo.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint


def main() -> int:
    """Attend to what a linear of DTensors has computed."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))

    def attention(inputs: torch.Tensor) -> torch.Tensor:
        values = nn.functional.linear(DTensor.from_local(inputs, mesh, [Replicate()]), weight).to_local()
        return nn.functional.scaled_dot_product_attention(values, values, values)

    def recomputed(inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(attention, inputs, use_reentrant=False)
        return outputs

    recomputed(torch.ones(1, 1, 2, 2)).sum().backward()
    failed = 0
    try:
        torch.compile(recomputed, backend="aot_eager")(torch.ones(1, 1, 2, 2)).sum().backward()
    except Exception as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error!s}", flush=True)
        failed = 1
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
