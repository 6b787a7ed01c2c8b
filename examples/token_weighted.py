"""Cross-entropy over labelled tokens, with one rank that has none: one table row for each layout.

The mean is over the labelled tokens in the whole batch, so each rank divides its sum by a count over all ranks. Run it with
``equivcheck matrix examples/token_weighted.py``. One layout is wrong on purpose: it divides by the labelled tokens in a rank's
own rows, as torchtitan did until issue #1842. Tokens on a rank with few labels then count more, and a rank without labels divides
zero by zero if the count is not clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import equivcheck

VOCABULARY, WIDTH, SEQUENCE, IGNORED = 10, 6, 5, -100


def build() -> nn.Module:
    """Model from tokens to logits."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the losses over the labelled tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss over the labelled tokens, which one device uses."""
    return summed(logits, labels) / (labels != IGNORED).sum()


def count_of_all_ranks(labels: torch.Tensor) -> torch.Tensor:
    """Average number of labelled tokens per rank. It is not the sum, because gradients are averaged over ranks."""
    count = (labels != IGNORED).sum().double()
    dist.all_reduce(count)
    return count / dist.get_world_size()


def count_of_own_rows(labels: torch.Tensor) -> torch.Tensor:
    """Bug: number of labelled tokens in this rank's own rows."""
    return (labels != IGNORED).sum().clamp(min=1)


def step_with(count: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Training step for a rank that divides its summed loss by `count(labels)`."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        tokens, labels = batch
        optimizer.zero_grad()
        value = summed(model(tokens), labels) / count(labels)
        value.backward()
        optimizer.step()
        return value

    return step


def ddp(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Replicate the model and average gradients."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the model. On a mesh with two axes, the first one replicates the shards (HSDP)."""
    fully_shard(model, mesh=mesh)


def batches(rows: int = 4, steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches whose row `i` has `i` labels. In the first batch the second row has none either."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        tokens, labels = (torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator) for _ in range(2))
        labels[torch.arange(SEQUENCE) >= torch.arange(rows)[:, None]] = IGNORED
        if step == 0:
            labels[:2] = IGNORED
        found.append((tokens, labels))
    return found


matrix = equivcheck.Matrix(
    model=build,
    batches=batches(),
    loss=mean,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    rank_step=step_with(count_of_all_ranks),
    layouts={
        "DDP": {"mesh": {"dp": 2}, "parallelize": ddp},
        "FSDP2": {"mesh": {"dp": 2}, "parallelize": fsdp2},
        "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallelize": fsdp2},
        "DDP, counts of own rows (torchtitan #1842)": {
            "mesh": {"dp": 2},
            "parallelize": ddp,
            "rank_step": step_with(count_of_own_rows),
            "expected": "diverged",
        },
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
