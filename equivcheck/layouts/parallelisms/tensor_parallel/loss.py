"""The loss of logits of which each rank has those of its own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed.tensor.parallel import loss_parallel

from equivcheck.scenario import Training
from equivcheck.training.layers.module import beside
from equivcheck.training.setup import Setup

Loss = Callable[[Training, torch.Tensor, torch.Tensor, float], torch.Tensor]


def keep_logits_apart(setup: Setup) -> None:
    """Compute loss and backward under `loss_parallel`, of logits that are DTensors, beside labels that every rank has."""
    setup.loss = partial(_of_dtensors, setup.loss)
    setup.around_compute = _in_loss_parallel


def _of_dtensors(inner: Loss, training: Training, logits: torch.Tensor, labels: torch.Tensor, divisor: float) -> torch.Tensor:
    return inner(training, logits, beside(logits, labels), divisor)


@contextmanager
def _in_loss_parallel() -> Iterator[None]:
    """`loss_parallel`, left as without an error where there is one: it takes its handlers back only then."""
    entered = loss_parallel()
    entered.__enter__()
    try:
        yield
    finally:
        entered.__exit__(None, None, None)
