"""A small model on rows of features, for libraries that bring no model of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

FEATURES, WIDTH, CLASSES, ROWS, STEPS, MICROBATCHES = 8, 6, 3, 4, 3, 2


def build() -> nn.Module:
    """Two linears."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def batches(microbatches: int = 1) -> list[Any]:
    """Inputs and targets of each step, or a list of as many microbatches."""
    generator = torch.Generator().manual_seed(0)
    pairs = [
        [
            (torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, CLASSES, generator=generator))
            for _ in range(microbatches)
        ]
        for _ in range(STEPS)
    ]
    return pairs if microbatches > 1 else [pair for (pair,) in pairs]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The usual optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def training(**given: Any) -> dict[str, Any]:
    """Arguments of `check_training` on two data ranks."""
    usual = {"model": build, "mesh": {"dp": 2}, "batches": batches(), "loss": nn.functional.mse_loss, "optimizer": adamw}
    return usual | given
