"""Small trainings to record, on one device and on ranks of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from equivcheck.recording.watch.record import record

STEPS = 3
Fault = Callable[[int, nn.Module], None]
"""Called with the step and the model, before gradients are clipped."""


class Model(nn.Module):
    """Embedding, norm and two linears, one of them wide enough for rows of its own in a sketch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up, self.norm, self.down = nn.Linear(6, 72), nn.LayerNorm(72), nn.Linear(72, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores with shape (rows, 3)."""
        self.calls += 1
        scores: torch.Tensor = self.down(self.norm(torch.tanh(self.up(self.embedding(tokens)))))
        return scores


def ddp(model: Model) -> nn.Module:
    """Replicas."""
    return DistributedDataParallel(model)


def fsdp1(model: Model) -> nn.Module:
    """One flat parameter, cut anywhere."""
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(model: Model) -> nn.Module:
    """Shards along dim 0, of units inside a root."""
    fully_shard(model.up)
    return fully_shard(model)


def tensor_parallel(model: Model) -> nn.Module:
    """Shards along dim 1 and dim 0 on all ranks, with the rows of one device."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


LAYOUTS: dict[str, Callable[[Model], nn.Module]] = {"": lambda model: model, "plain": lambda model: model}
LAYOUTS |= {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "tensor_parallel": tensor_parallel}


def train(folder: Path, layout: str = "", fault: str = "", moved: int = 0) -> None:
    """Train and record."""
    torch.manual_seed(0)
    model = Model()
    if layout in {"plain", "tensor_parallel"}:
        model.norm = nn.Identity()  # type: ignore[assignment] # a norm would see a part of the features
    module = LAYOUTS[layout](model)
    with record(folder, moved=moved):
        _loop(module, layout, fault)


def _loop(module: nn.Module, kind: str, fault: str) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01 if fault != "learning rate" else 0.011)
    count, rank = (dist.get_world_size(), dist.get_rank()) if kind in {"ddp", "fsdp1", "fsdp2"} else (1, 0)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(11, (12,), generator=generator), torch.randn(12, 3, generator=generator)
        optimizer.zero_grad()
        for part in range(2):
            own = slice(rank + part * count, None, 2 * count) if fault != "same rows" else slice(part, None, 2 * count)
            loss = nn.functional.mse_loss(module(tokens[own]), targets[own])
            (loss / (1 if fault == "not averaged" else 2)).backward()
        if fault == "gradient" and step == 1:
            parameter = next(iter(module.parameters()))
            parameter.grad = None if parameter.grad is None else parameter.grad * 1.5
        if fault == "not clipped" or kind in {"plain", "tensor_parallel"}:
            pass  # torch clips no mix of plain tensors and DTensors
        elif isinstance(module, FullyShardedDataParallel):
            module.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        if fault == "replica" and step == 1 and dist.get_rank() == 1:
            next(iter(module.parameters())).data.mul_(1.5)
        with torch.no_grad():
            module(tokens)  # an evaluation between the steps counts as none


def train_on_rank(folder: Path, *arguments: str) -> None:
    """Entry point on ranks."""
    train(folder, *arguments)
