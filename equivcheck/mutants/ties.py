"""Layers that share a weight no longer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from equivcheck.mutants.parameters import use_through
from equivcheck.train.model import Block
from equivcheck.train.setup import Setup


class Stale:
    """The values that a weight had when it was first used, with the gradients of what it is."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight with its first values: exactly itself until it is updated."""
        if self.first is None:
            self.first = weight.detach().clone()
        return weight + (self.first - weight).detach()


class Detached:
    """A weight that is given no gradient."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as a constant."""
        return weight.detach()


def untie(setup: Setup, through: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Let each layer that shares a weight of an earlier one use it through a function of its own."""
    for module in setup.model.modules():
        if isinstance(module, Block) and module.layer.shares is not None:
            _use_weight_through(module.linear, through())


def _use_weight_through(linear: nn.Linear, through: Callable[[torch.Tensor], torch.Tensor]) -> None:
    use_through(linear, lambda parameter: through(parameter) if parameter.ndim == 2 else parameter)
