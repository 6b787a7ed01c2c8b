"""A handwritten tensor-parallel training, with Megatron's attributes on its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equivcheck.recording.watch.record import record

VOCABULARY, WIDTH, HIDDEN, STEPS = 12, 6, 40, 3


class _Copy(torch.autograd.Function):
    """Identity whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Sum over the group, whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, group: Any) -> torch.Tensor:
        inputs = inputs.clone()
        dist.all_reduce(inputs, group=group)
        return inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class Linear(nn.Module):
    """A weight that is split along a dim, in `parts` parts that are each split."""

    def __init__(self, full: torch.Tensor, dim: int, parts: int, place: tuple[int, int], group: Any) -> None:
        super().__init__()
        rank, size = place
        shards = [part.chunk(size, dim)[rank] for part in full.chunk(parts, dim)]
        self.weight = nn.Parameter(torch.cat(shards, dim))
        if group is not None:
            self.tp_group = group

    def mark(self, dim: int, stride: int) -> None:
        """Set Megatron's attributes."""
        for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", stride)):
            setattr(self.weight, name, value)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight.T


class Model(nn.Module):
    """Vocabulary-parallel embedding, norm, and a gated MLP: columns, then rows."""

    def __init__(self, place: tuple[int, int], group: Any, *, has_group: bool) -> None:
        super().__init__()
        self.place, self.group = place, group
        draw = torch.Generator().manual_seed(0)
        given = group if has_group else None
        self.embedding = Linear(torch.randn(VOCABULARY, WIDTH, generator=draw), 0, 1, place, given)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(torch.randn(2 * HIDDEN, WIDTH, generator=draw) / 3, 0, 2, place, given)
        self.down = Linear(torch.randn(WIDTH, HIDDEN, generator=draw) / 6, 1, 1, place, given)

    def mark(self) -> None:
        """Set Megatron's attributes."""
        self.embedding.mark(0, 1)
        self.up.mark(0, 2)
        self.down.mark(1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Features with shape (rows, width)."""
        rank, size = self.place
        count = VOCABULARY // size
        own = (tokens >= rank * count) & (tokens < (rank + 1) * count)
        rows = self.embedding.weight[(tokens - rank * count).clamp(0, count - 1)] * own[:, None]
        features = self.norm(self.sum(rows))
        gate, up = self.up(self.copy(features)).chunk(2, -1)
        return features + self.sum(self.down(nn.functional.silu(gate) * up))

    def copy(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if self.place[1] == 1 else _Copy.apply(inputs, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def sum(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if self.place[1] == 1 else _Sum.apply(inputs, self.group)  # type: ignore[no-any-return,no-untyped-call]


Change = Callable[[int, Model], None]
"""Called before each update, with the step and the model."""


def train(  # noqa: PLR0913 - options, all by keyword
    folder: Path,
    *,
    tensor_ranks: int = 1,
    is_marked: bool = False,
    has_group: bool = False,
    fault: str = "",
    moved: int = 0,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Train on rows of the data ranks, with the shards of the tensor-parallel ranks. The latter follow each other."""
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    data_ranks, data_rank = num_ranks // tensor_ranks, rank // tensor_ranks
    groups = [
        dist.new_group(list(range(first, first + tensor_ranks))) for first in range(0, num_ranks, tensor_ranks) if num_ranks > 1
    ]
    across = [dist.new_group(list(range(first, num_ranks, tensor_ranks))) for first in range(tensor_ranks) if num_ranks > 1]
    place = rank % tensor_ranks, tensor_ranks
    model = Model(place, groups[data_rank] if groups else None, has_group=has_group)
    if is_marked:
        model.mark()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with record(folder, moved=moved, **(options or {})):
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step)
            tokens, targets = torch.randint(VOCABULARY, (8,), generator=draw), torch.randn(8, WIDTH, generator=draw)
            optimizer.zero_grad()
            own = slice(data_rank, None, data_ranks)
            nn.functional.mse_loss(model(tokens[own]), targets[own]).backward()
            for parameter in model.parameters() if data_ranks > 1 else ():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=across[place[0]])
                parameter.grad /= data_ranks
            _break(model, fault, place[0])
            optimizer.step()


def _break(model: Model, fault: str, rank: int) -> None:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if fault == "up" and rank == 1:
        gradients["up.weight"][-3:] *= 1.5
    if fault == "down" and rank == 1:
        gradients["down.weight"] *= 1.1
    if fault == "norm" and rank == 1:
        gradients["norm.weight"] *= 1.1


def train_on_rank(folder: Path, options: Mapping[str, Any]) -> None:
    """Entry point on ranks."""
    train(folder, **options)
