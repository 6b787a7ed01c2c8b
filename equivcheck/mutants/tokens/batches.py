"""Replace the microbatches or the loss before ranks take their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from equivcheck.mutants.tokens.needs import cross_entropy_of
from equivcheck.scenario import Training
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def compute_on(setup: Setup, change: Callable[[Sequence[Batch]], Sequence[Batch]]) -> None:
    """Change each step's full microbatches."""
    inner = setup.compute
    setup.compute = lambda setup, batches, index: inner(setup, change(batches), index)


def minimise(setup: Setup, **changes: float | bool) -> None:
    """Change fields in the cross-entropy loss; its divisor stays."""
    inner = setup.loss

    def loss(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        other = replace(cross_entropy_of(setup), **changes)  # type: ignore[arg-type]
        return inner(replace(training, loss=other), outputs, targets, divisor)

    setup.loss = loss
