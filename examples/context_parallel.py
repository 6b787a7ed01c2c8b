"""Causal attention under context parallelism: one table row for each layout.

Each rank holds a part of every sequence. Either keys and values are gathered from all ranks, or an all-to-all gives each rank all
positions for some heads (Ulysses). Run it with ``equivcheck matrix examples/context_parallel.py``. Two layouts are wrong on
purpose:

- DeepSpeed issue #5248: gradients are summed over the ranks that share sequences, but not divided by their number, although each
  loss is the mean over a rank's own positions.
- verl pull request #6267 fixed wrong positions on one rank. Here every rank counts positions from 0, so its rotary embeddings and
  its causal mask are those for the first part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import equivcheck

VOCABULARY, WIDTH, HEADS, SEQUENCE, ROWS, STEPS = 10, 8, 4, 8, 2, 2


class Attention(nn.Module):
    """Causal attention with rotary embeddings. One rank holds all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Shapes (rows, sequence, width)."""
        query, key, value = (
            projection(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        attended = self.attended(rotated(query, positions), rotated(key, positions), value, positions)
        return self.output(attended.transpose(1, 2).flatten(2))

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend with tensors (rows, heads, sequence, features). Keys and values cover all positions."""
        mask = positions[:, None] >= torch.arange(key.shape[2])
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn each pair of features by an angle that depends on the position."""
    angles = positions[:, None] * 0.5
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1)


class GatheredAttention(Attention):
    """Attention to keys and values gathered from all ranks."""

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend with this rank's queries."""
        return super().attended(query, Gather.apply(key, self.group), Gather.apply(value, self.group), positions)


class UlyssesAttention(Attention):
    """Attention for some heads and all positions on each rank."""

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend with this rank's heads."""
        query, key, value = (AllToAll.apply(part, 1, 2, self.group) for part in (query, key, value))
        everywhere = torch.arange(query.shape[2], device=positions.device)
        return AllToAll.apply(super().attended(query, key, value, everywhere), 2, 1, self.group)


class Gather(torch.autograd.Function):
    """Gather the sequence (dim 2) from all ranks. Backward sums the gradients over ranks and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Concatenate the parts from all ranks."""
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the gradient over ranks and keep this rank's part."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), dim=2)[ctx.group.rank()], None


class AllToAll(torch.autograd.Function):
    """Split along one dim, exchange, and concatenate along another. Backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> torch.Tensor:
        """Send one piece to each rank and concatenate the received pieces."""
        ctx.cut, ctx.joined, ctx.group = cut, joined, group
        sent = torch.stack(part.chunk(group.size(), dim=cut)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the pieces to their ranks."""
        return AllToAll.apply(gradient, ctx.joined, ctx.cut, ctx.group), None, None, None


class Model(nn.Module):
    """Language model with one attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention, self.output = nn.Embedding(VOCABULARY, WIDTH), Attention(), nn.Linear(WIDTH, VOCABULARY)
        self.part = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (rows, sequence), or one part of the sequence, to logits."""
        x, length = self.embedding(tokens), tokens.shape[1]
        return self.output(x + self.attention(x, torch.arange(length) + self.part * length))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss over positions."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def part_of_sequences(batch: Any, mesh: DeviceMesh) -> Any:
    """Take this rank's positions, and its rows if the mesh has a data-parallel axis."""
    found = tuple(each.chunk(mesh["cp"].size(), dim=1)[mesh.get_local_rank("cp")] for each in batch)
    if "dp" not in (mesh.mesh_dim_names or ()):
        return found
    return tuple(each.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for each in found)


def spread(attention: type[Attention]) -> Callable[[Model, DeviceMesh], Model]:
    """Give the model one kind of attention, without any gradient reduction."""

    def parallelize(model: Model, mesh: DeviceMesh) -> Model:
        model.attention.__class__ = attention
        model.attention.group, model.part = mesh.get_group("cp"), mesh.get_local_rank("cp")
        return model

    return parallelize


def averaged(attention: type[Attention]) -> Callable[[Model, DeviceMesh], nn.Module]:
    """Average gradients over all ranks, because each loss is the mean over a rank's own positions."""
    return lambda model, mesh: DistributedDataParallel(spread(attention)(model, mesh))


def summed(model: Model, mesh: DeviceMesh) -> Model:
    """First bug: Ulysses with gradients that are summed, not averaged."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    return spread(UlyssesAttention)(model, mesh)


def counted_anew(model: Model, mesh: DeviceMesh) -> nn.Module:
    """Second bug: every rank counts positions from 0."""
    found = averaged(GatheredAttention)(model, mesh)
    model.part = 0
    return found


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and next tokens for each step."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator) for _ in range(STEPS)]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


matrix = equivcheck.Matrix(
    model=Model,
    batches=batches(),
    loss=cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    shard=part_of_sequences,
    layouts={
        "keys and values gathered": {"mesh": {"cp": 2}, "parallelize": averaged(GatheredAttention)},
        "keys and values gathered, x DP": {"mesh": {"dp": 2, "cp": 2}, "parallelize": averaged(GatheredAttention)},
        "Ulysses": {"mesh": {"cp": 2}, "parallelize": averaged(UlyssesAttention)},
        "Ulysses on 4": {"mesh": {"cp": 4}, "parallelize": averaged(UlyssesAttention)},
        "gradients summed (DeepSpeed #5248)": {"mesh": {"cp": 2}, "parallelize": summed, "expected": "diverged"},
        "positions counted anew (verl #6267)": {"mesh": {"cp": 2}, "parallelize": counted_anew, "expected": "diverged"},
    },
)

if __name__ == "__main__":
    print(matrix.run().describe())
