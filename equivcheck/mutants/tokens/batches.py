"""What a step is computed on, or its loss, replaced before ranks take their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def compute_on(setup: Setup, change: Callable[[Sequence[Batch]], Sequence[Batch]]) -> None:
    """Let each step compute on other microbatches, changed while they are whole."""
    inner = setup.compute
    setup.compute = lambda setup, batches, index: inner(setup, change(batches), index)


def minimise(setup: Setup, **changes: float | bool) -> None:
    """Let the loss of labels have other values of some fields; it is divided by what it was."""
    inner = setup.loss

    def loss(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        assert isinstance(training.loss, CrossEntropy), "it was chosen for its labels"
        other = replace(training.loss, **changes)  # type: ignore[arg-type]
        return inner(replace(training, loss=other), outputs, targets, divisor)

    setup.loss = loss
