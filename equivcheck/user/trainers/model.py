"""Model, batches and loss for a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerModel:
    """A small model that a trainer can train. A recipe for ``equivcheck trainer --model`` defines one."""

    model: Callable[[], nn.Module]
    """Builds the model."""
    draw: Callable[[int, torch.Generator], Any]
    """Called with a number of rows and a generator. Returns a microbatch: a pair of inputs and targets with as many rows."""
    loss: Callable[[Any, Any], torch.Tensor]
    """Called with outputs and targets. Returns the mean over rows."""
    optimizer: Callable[[list[Any]], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=0.01)
    """Called with parameters."""
