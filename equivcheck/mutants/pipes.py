"""Pipes whose loss of a chunk is not its part of the loss of the step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch

from equivcheck.parallelisms.pipeline.schedules import Pipe
from equivcheck.train.accumulate import loss_of, scaled
from equivcheck.train.setup import Setup

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pipe_of(setup: Setup) -> Pipe | None:
    """What runs the stages of this rank; None under a layout without stages."""
    pipe = getattr(setup.compute, "__self__", None)
    return pipe if isinstance(pipe, Pipe) else None


class LosesChunk(Pipe):
    """Leaves the last chunk of each microbatch out."""

    def loss_of_chunk(self, rows: int) -> Loss:
        """Nothing for every last chunk; the schedule asks for those of a microbatch in order."""
        inner, chunks, numbers = super().loss_of_chunk(rows), self.parallelism.num_chunks, count(1)
        return lambda outputs, targets: inner(outputs, targets) * (0.0 if next(numbers) % chunks == 0 else 1.0)


class CountsChunks(Pipe):
    """Weighs each chunk as if it had all rows of its microbatch."""

    def loss_of_chunk(self, rows: int) -> Loss:
        """As many times too much as there are chunks."""
        return lambda outputs, targets: scaled(self.setup, loss_of(self.setup.training, outputs, targets), rows)
