"""An exponential moving average (EMA) of the weights, used as a teacher: one table row for each layout.

The average is a copy of the model whose parameters the optimizer does not update. Each rank updates its own shards once per step,
after the optimizer; this is correct because the update is elementwise. Run it with ``equivcheck matrix
examples/weight_averaging.py``. The last layout is wrong on purpose, because of F5-TTS issue #631: the average is updated once for
each microbatch, so it follows the weights too fast if a step has several.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import equivcheck

DECAY, MICROBATCHES = 0.75, 2


class Student(nn.Module):
    """Trained network and its moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the network and of its average."""
        return self.net(x), self.average(x)


def loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Distance to the targets plus distance to the teacher."""
    student, teacher = outputs
    return functional.mse_loss(student, targets) + functional.mse_loss(student, teacher)


def update(model: nn.Module) -> None:
    """Update the average with this rank's parameters."""
    student = getattr(model, "module", model)
    with torch.no_grad():
        for average, parameter in zip(student.average.parameters(), student.net.parameters(), strict=True):
            average.lerp_(parameter, 1 - DECAY)


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any) -> float:
    """Run the microbatches and the optimizer, then update the average once."""
    total = accumulate(model, batch, optimizer, loss_of)
    optimizer.step()
    update(model)
    return total


def accumulate(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any) -> float:
    """Run forward and backward for each microbatch."""
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in batch:
        value = loss_of(model(inputs), targets) / len(batch)
        value.backward()
        total += value.item()
    return total


def step_with_eager_average(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_of: Any) -> float:
    """Bug: update the average once for each microbatch."""
    total = accumulate(model, batch, optimizer, loss_of)
    optimizer.step()
    for _ in batch:
        update(model)
    return total


def ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Replicate the model and its average."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the network and its average in the same way."""
    fully_shard(model.net, mesh=mesh)
    fully_shard(model.average, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batches() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Microbatches for each step."""
    generator = torch.Generator().manual_seed(0)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)

    return [[pair() for _ in range(MICROBATCHES)] for _ in range(3)]


matrix = equivcheck.Matrix(
    model=Student,
    batches=batches(),
    loss=loss,
    optimizer=lambda parameters: torch.optim.Adam([each for each in parameters if each.requires_grad], lr=1e-2),
    step=step,
    layouts={
        "DDP": {"mesh": {"dp": 2}, "parallelize": ddp},
        "FSDP2": {"mesh": {"dp": 2}, "parallelize": fsdp2},
        "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallelize": fsdp2},
        "updated with each microbatch (F5-TTS #631)": {
            "mesh": {"dp": 2},
            "parallelize": fsdp2,
            "rank_step": step_with_eager_average,
            "expected": "diverged",
        },
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
