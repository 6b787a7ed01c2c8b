"""Programs for ranks with a known result. Tests run them to compare ``sim``, ``gloo`` and plain arithmetic.

The programs read DTensors whose dims are sharded unevenly, twice or with strides. For such tensors torch computes values that
depend on the rank, so threads that wrongly share state fail here first.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

MESHES = ((4,), (2, 2), (2, 2), (2, 2), (1, 4), (4, 1))
"""Mesh shapes for four ranks; meshes that can shard a dim twice appear more often."""
NUM_RANKS = 4
"""World size for the programs."""


def check_redistributions(seed: int) -> list[bool]:
    """Distribute a random tensor, and redistribute it up to two times.

    After each change, compare `full_tensor()` with the original tensor. Returns a list with True for each equal result.
    """
    chance = random.Random(seed)
    mesh = init_device_mesh("cpu", chance.choice(MESHES))
    shape = [chance.randint(1, 7) for _ in range(chance.choice((1, 2, 2)))]
    full = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    tensor = distribute_tensor(full, mesh, _placements(chance, mesh.ndim, len(shape)))
    found = [torch.equal(tensor.full_tensor(), full)]
    for _ in range(chance.randrange(3)):
        tensor = tensor.redistribute(placements=_placements(chance, mesh.ndim, len(shape)))
        found.append(torch.equal(tensor.full_tensor(), full))
    return found


def _placements(chance: random.Random, num_axes: int, num_dims: int) -> list[Any]:
    choices = [Replicate(), *[Shard(dim) for dim in range(num_dims)] * 2]
    return [chance.choice(choices) for _ in range(num_axes)]


def check_double_sharding(kind: str, rows: int) -> list[bool]:
    """Shard dim 0 of a layer's weight by tensor parallelism and again by `fully_shard`.

    Returns two bools: whether `full_tensor()` is right for the weight, and for its gradient. `kind` is ``linear``
    (column-parallel) or ``embedding`` (vocabulary-parallel). `rows` is the layer's output size or the vocabulary size.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, spread = _layer(kind, rows), nn.Sequential(_layer(kind, rows))
    embedding = kind == "embedding"
    style = RowwiseParallel(input_layouts=Replicate()) if embedding else ColwiseParallel(output_layouts=Replicate())
    parallelize_module(spread, mesh["tp"], {"0": style})
    fully_shard(spread, mesh=mesh["dp"])
    inputs = torch.tensor([[0, 3 % rows, 6 % rows]]) if embedding else torch.ones(2, 4, dtype=torch.float64)
    for layer in (alone, spread):
        outputs = layer(inputs)
        (outputs * torch.arange(outputs.numel(), dtype=torch.float64).view(outputs.shape)).sum().backward()
    weight: Any = spread[0].weight
    return [torch.equal(weight.full_tensor(), alone.weight), torch.equal(weight.grad.full_tensor(), alone.weight.grad)]


def _layer(kind: str, rows: int) -> Any:
    layer = nn.Embedding(rows, 4) if kind == "embedding" else nn.Linear(4, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(4 * rows).view(rows, 4) % 11)
    return layer.double()


def check_loss_parallel() -> list[bool]:
    """Compare `loss_parallel` with a plain cross-entropy.

    Returns two bools: whether the loss is equal, and whether the gradient is equal. Ranks enter `loss_parallel` at different
    times.
    """
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    logits = (torch.arange(42, dtype=torch.float64).view(6, 7) * 5 % 8).requires_grad_()
    target = torch.tensor([0, 6, 3, 2, 5, 1])
    loss = nn.functional.cross_entropy(logits, target)
    loss.backward()  # type: ignore[no-untyped-call]
    spread = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    for _ in range(dist.get_rank()):
        dist.barrier()
    with loss_parallel():
        for _ in range(NUM_RANKS - dist.get_rank()):
            dist.barrier()
        found: Any = nn.functional.cross_entropy(spread, target)
        found.backward()
    dist.barrier()
    assert logits.grad is not None
    gradient: Any = spread.grad
    return [torch.allclose(found.full_tensor(), loss), torch.allclose(gradient.full_tensor(), logits.grad)]
