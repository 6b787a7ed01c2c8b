"""A compiled module leaves no gradient to what came before it where that is pending, as what `RowwiseParallel` returns.

The embedding's sum is an `AsyncCollectiveTensor`. What is compiled takes the tensor out of it, which has another graph: on torch
2.12 and 2.13 the embedding has no gradient, silently; on others backward raises.

    torchrun --standalone --nproc-per-node 2 compiled_layer_after_pending_embedding.py

Exit code 1 when it shows. Seen on torch 2.13, CPU, gloo.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def as_dtensor(_module: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh) -> DTensor:
    """What a linear takes."""
    return DTensor.from_local(inputs[0], mesh, [Replicate()])


def as_local(_module: nn.Module, outputs: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
    """What it gives."""
    return outputs.to_local()


def main() -> int:
    """Compute the gradient of an embedding before a compiled linear."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2,))
    embedding = parallelize_module(nn.Embedding(4, 2), mesh, RowwiseParallel(input_layouts=Replicate()))
    linear = distribute_module(nn.Linear(2, 2, bias=False), mesh, None, as_dtensor, as_local)
    tokens = torch.tensor([[0, 3, 0], [0, 1, 1]])
    linear(embedding(tokens)).sum().backward()
    expected, embedding.weight.grad = embedding.weight.grad, None
    linear.compile(backend="aot_eager")
    difference = float("nan")
    try:
        linear(embedding(tokens)).sum().backward()
        gradient = embedding.weight.grad
        print("gradient", gradient)
        difference = float("nan") if gradient is None else float((gradient - expected).full_tensor().abs().max())
    except (AttributeError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}")
    print("max difference", difference)
    dist.destroy_process_group()
    return int(difference != 0)


if __name__ == "__main__":
    sys.exit(main())
