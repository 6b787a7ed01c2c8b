"""Tokens to train on, and the loss of what follows each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY, ROWS, LENGTH, STEPS = 32, 4, 8, 3


def batches() -> list[Any]:
    """Tokens and the next ones, of each step."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (STEPS, ROWS, LENGTH + 1), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def next_token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over tokens, of logits or of an output that has some."""
    logits = getattr(outputs, "logits", outputs)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-2)
