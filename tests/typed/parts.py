"""Shared parts of the programs: models, batches, and the copy before the ranks' own work."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, R
from torch import nn
from torch.nn import functional

WIDTH, HIDDEN, SEQUENCE, ROWS, VOCABULARY, NUM_BATCHES = 4, 8, 6, 4, 8, 2
MAX_NORM, EPSILON = 2.8, 1e-6
"""For clipping: only the second step exceeds the norm, and the epsilon is that of `torch.nn.utils.clip_grad_norm_`."""
COLUMNS_AND_ROWS = {"up.*": ((0, "tp"),), "down.weight": ((1, "tp"),)}
"""Sharding of `Block` by columns and rows."""


class Block(nn.Module):
    """A norm and a perceptron with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any number of positions."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape (tokens, vocabulary)."""
        return self.head(torch.tanh(self.embedding(tokens)))


class Matrices(nn.Module):
    """Two square matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps the shape."""
        return torch.tanh(x @ self.first) @ self.second


class Experts(nn.Module):
    """A router, and a matrix for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs from the chosen experts, and the balance loss."""
        chances = (x @ self.router).softmax(-1)
        mask = functional.one_hot(chances.argmax(-1), 2).to(x)
        done = torch.tanh(x @ self.experts)
        return (done * (chances * mask).T[..., None]).sum(0), (mask.mean(0) * chances.mean(0)).sum()


class Attention(nn.Module):
    """One head with rotary positions, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input shape (rows, positions, width)."""
        positions = torch.arange(x.shape[1])
        query, key = rotated(x @ self.query, positions), rotated(x @ self.key, positions)
        return attended(query, key, x @ self.value, positions[:, None] >= positions)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate by angles that grow with positions."""
    left, right = x.chunk(2, -1)
    angles = positions[:, None] * 0.5 ** torch.arange(WIDTH // 2)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
    """Attention to visible positions."""
    return (query @ key.mT).masked_fill(~is_seen, -1e9).softmax(-1) @ value


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations."""
    x = matrix / matrix.square().sum().sqrt()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def copied(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Copy to the region in which each rank computes a part; backward sums the gradients."""
    return spmd.convert(tensor, group, src=I, dst=R)


def numbers(*shapes: tuple[int, ...], growth: float = 1) -> tuple[Any, ...]:
    """Batches of random tensors; each is larger than the previous one by `growth`."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        tuple(growth**number * torch.randn(shape, generator=generator) for shape in shapes) for number in range(NUM_BATCHES)
    )


def words() -> tuple[Any, ...]:
    """Batches of tokens and the tokens that follow."""
    generator = torch.Generator().manual_seed(0)
    return tuple(tuple(torch.randint(VOCABULARY, (2, 8), generator=generator)) for _ in range(NUM_BATCHES))


def clipping(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Single-device step with clipping."""
    optimizer.zero_grad()
    value: torch.Tensor = loss(model(batch[0]), batch[1])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return value
