"""The gradient of an elementwise product with an expanded scalar has other strides locally than globally. Autograd takes a
view of the local tensor although it needs a copy.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def squared(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss on values that are flattened, viewed in their original shape, and transposed."""
    return (values.flatten().view(values.shape).T - target).square().sum()


def main() -> None:
    """Compute the gradient of a squared loss with plain tensors and with DTensors."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    squared(torch.ones(2 * size, 3, requires_grad=True), torch.zeros(3, 2 * size)).backward()

    values = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_()
    target = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(1)])
    squared(values, target).backward()
