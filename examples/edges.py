"""Edges between DTensors and plain tensors: one table row for each way to cross them.

The activations are sharded along the sequence, and a layer multiplies them by a replicated weight. In plain tensors, each rank's
gradient of this weight is a partial sum. You declare this with `grad_placements` in `to_local`, or with `in_grad_placements` in
`local_map`. If you do not, torch uses the weight's placement, and partial sums pass as the full gradient. Run it with
``equivcheck matrix examples/edges.py``. Two layouts are wrong on purpose:

- torchtitan pull request #2532 fixed a norm's weight under tensor parallelism, because `to_local` had no `grad_placements`.
- autoparallel issue #515: `local_map` gives the gradients of weights the same placements as the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import equivcheck

WIDTH, SEQUENCE, ROWS, STEPS = 4, 6, 2, 2
PARTS, WHOLE, ADDENDS = [Shard(1)], [Replicate()], [Partial()]


class Scaled(nn.Module):
    """Normalise the features and multiply each by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the shape (rows, sequence, width)."""
        return scaled(x, self.weight)


def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Normalise and scale plain tensors."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * weight


def model() -> nn.Module:
    """Two linears with a `Scaled` layer between them."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, WIDTH))


def by_to_local(x: DTensor, weight: DTensor, grad_placements: Any) -> torch.Tensor:
    """Convert to plain tensors with `to_local`, and back with `from_local`."""
    found = scaled(x.to_local(grad_placements=PARTS), weight.to_local(grad_placements=grad_placements))
    return DTensor.from_local(found, x.device_mesh, PARTS)


def by_local_map(x: DTensor, weight: DTensor, grad_placements: Any) -> torch.Tensor:
    """Convert with `local_map`, which takes the placements once for the whole function."""
    gradients = None if grad_placements is None else (PARTS, grad_placements)
    mapped = local_map(
        scaled, out_placements=PARTS, in_placements=(PARTS, WHOLE), in_grad_placements=gradients, device_mesh=x.device_mesh
    )
    return mapped(x, weight)


def cross(
    module: nn.Sequential, mesh: DeviceMesh, *, by: Callable[..., torch.Tensor] = by_to_local, grad_placements: Any = ADDENDS
) -> nn.Module:
    """Replicate the weights, shard activations along the sequence, and run the middle layer on plain tensors."""
    for layer in module:
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, WHOLE)))
    middle = module[1]
    middle.forward = lambda x: by(x, middle.weight, grad_placements)
    module.register_forward_pre_hook(lambda _module, inputs: (distribute_tensor(inputs[0], mesh, PARTS),))
    module.register_forward_hook(lambda _module, _inputs, output: output.full_tensor())
    return module


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets for each step."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, SEQUENCE, WIDTH)
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(STEPS)]


MESH = {"tp": 2}
WRONG = {"mesh": MESH, "expected": "diverged"}

matrix = equivcheck.Matrix(
    model=model,
    batches=batches(),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    layouts={
        "to_local": {"mesh": MESH, "parallelize": cross},
        "local_map": {"mesh": MESH, "parallelize": partial(cross, by=by_local_map)},
        "to_local says nothing (torchtitan #2532)": {"parallelize": partial(cross, grad_placements=None), **WRONG},
        "local_map says nothing (autoparallel #515)": {
            "parallelize": partial(cross, by=by_local_map, grad_placements=None),
            **WRONG,
        },
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
