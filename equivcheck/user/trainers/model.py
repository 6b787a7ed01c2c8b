"""`TrainerModel`: model, batches and loss for checking a trainer."""

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
    """Function for building the model."""
    draw: Callable[[int, torch.Generator], Any]
    """Function for drawing a microbatch, called with a number of rows and a generator.

    It returns a pair of inputs and targets with so many rows.
    """
    loss: Callable[[Any, Any], torch.Tensor]
    """Called with outputs and targets, returns the mean loss over rows."""
    optimizer: Callable[[list[Any]], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=0.01)
    """Called with a list of parameters, or with pairs of name and parameter if its argument is called ``named_parameters``.

    Returns an optimizer.
    """
