"""Head and loss in chunks along positions, so logits for all positions never exist at once."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from equivcheck.scenario import CrossEntropy, Training

if TYPE_CHECKING:
    from equivcheck.training.setup import Setup

POSITIONS = 1
"""Dim for splitting outputs and targets into chunks: positions, or rows if positions come first."""


def compute_in_chunks(setup: Setup, num_chunks: int) -> None:
    """Compute the model's last linear and the loss for one chunk of positions at a time.

    The model's forward stops before this linear. The loss function applies the linear to each chunk.
    """
    model: Any = setup.model
    model.defers_head, inner = True, setup.loss

    def loss(training: Training, hidden: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        losses, size = [], targets.shape[POSITIONS]
        is_mean = training.loss.is_mean and not isinstance(training.loss, CrossEntropy)
        for part, labels in zip(hidden.chunk(num_chunks, POSITIONS), targets.chunk(num_chunks, POSITIONS), strict=True):
            found = inner(training, model.project(part), labels, divisor)
            losses.append(found * (labels.shape[POSITIONS] / size) if is_mean else found)
        return reduce(torch.add, losses)

    setup.loss = loss
