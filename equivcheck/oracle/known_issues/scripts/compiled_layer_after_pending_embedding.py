"""The embedding returns an `AsyncCollectiveTensor`. The compiled code takes the tensor out of it, which has another graph. On
torch 2.12 and 2.13 the embedding silently has no gradient; on other versions backward raises.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def as_dtensor(_module: nn.Module, inputs: tuple[torch.Tensor], mesh: DeviceMesh) -> DTensor:
    """Convert the linear's input to a DTensor."""
    return DTensor.from_local(inputs[0], mesh, [Replicate()])


def as_local(_module: nn.Module, outputs: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
    """Convert the linear's output to a local tensor."""
    return outputs.to_local()


def main() -> float:
    """Compute the gradient of a row-parallel embedding in front of a compiled linear."""
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
    return difference
