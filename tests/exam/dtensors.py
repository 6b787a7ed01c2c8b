"""Bugs of DTensors: in what type gradients are added up, and what is taken for a part of a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

from exam.item import Trained
from exam.trainings import WIDTH, usual


class Scale(nn.Module):
    """A weight that a sequence is multiplied with, as that of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, sequence, width)."""
        return x * self.weight


def spread_in(param: torch.dtype) -> Any:
    """FSDP2 over sequence parallelism, with parameters cast to a type, and gradients to be reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=torch.float32, output_dtype=torch.float32)

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh["tp"], {"0": SequenceParallel()})
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    return parallelize


def mean_of(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    """Of all numbers, wherever they lie."""
    return (outputs.full_tensor() if isinstance(outputs, DTensor) else outputs).mean()


def reduce_dtype() -> Trained:
    """Rows whose products and sums bfloat16 has exactly, but for the sum over the two halves of the sequence."""
    rows = torch.ones(4, 2, WIDTH)
    rows[:, 1] *= 2.0**-10
    rows[2:] *= 2
    brought = usual(
        model=lambda: nn.Sequential(Scale()),
        mesh={"dp": 2, "tp": 2},
        parallelize=spread_in(torch.float32),
        batches=[(rows, torch.zeros(4))],
        loss=mean_of,
        dtype=None,
    )
    return Trained(brought, {"parallelize": spread_in(torch.bfloat16)})


class RowSplit(nn.Module):
    """Two linears, the second of which leaves parts of a sum."""

    detour: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, width)."""
        return self.whole(functional.linear(torch.tanh(self.first(x)), self.second.weight))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the parts, if there are any."""
        if not isinstance(x, DTensor):
            return x
        if self.detour is not None:
            x = DTensor.from_local(x.to_local(**self.detour), x.device_mesh, [Partial()])
        return x.full_tensor()


def split_by_rows(**gradient: Any) -> Any:
    """Columns, then rows; the sum is taken out of its DTensor and put into one again, with these placements of its gradient."""

    def parallelize(model: RowSplit, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh, {"first": ColwiseParallel(use_local_output=False)})
        model.second.weight = nn.Parameter(distribute_tensor(model.second.weight.detach(), mesh, [Shard(1)]))
        model.detour = gradient

    return parallelize


def by_local() -> Trained:
    """The gradient of a sum is the same for each part of it, and no part itself."""
    brought = usual(model=RowSplit, mesh={"tp": 2}, parallelize=split_by_rows(grad_placements=[Replicate()]))
    return Trained(brought, {"parallelize": split_by_rows(grad_placements=[Partial()])})


class Experts(nn.Module):
    """A gate, and what stands below it: a feed-forward of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, width)."""
        return self.computed(x + torch.sigmoid(self.gate(x)), self.up, self.down)

    def computed(self, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """On plain tensors."""
        return torch.relu(x @ up) @ down


def experts_over(gradients: Any) -> Any:
    """The experts' weights in parts, computed with on local tensors; the placements of what flows back are given, or not."""

    def parallelize(model: Experts, mesh: DeviceMesh) -> None:
        model.up = nn.Parameter(distribute_tensor(model.up.detach(), mesh, [Shard(1)]))
        model.down = nn.Parameter(distribute_tensor(model.down.detach(), mesh, [Shard(0)]))
        inner = local_map(
            model.computed,
            out_placements=[Partial()],
            in_placements=([Replicate()], [Shard(1)], [Shard(0)]),
            in_grad_placements=gradients,
            device_mesh=mesh,
        )
        model.computed = lambda x, *weights: inner(DTensor.from_local(x, mesh, [Replicate()]), *weights).full_tensor()

    return parallelize


def experts_without_placements() -> Trained:
    """Tensor parallelism over one pair of weights."""
    brought = usual(model=Experts, mesh={"tp": 2}, parallelize=experts_over(([Partial()], [Shard(1)], [Shard(0)])))
    return Trained(brought, {"parallelize": experts_over(None)})
