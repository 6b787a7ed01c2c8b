"""Steps in which microbatches have wrong weights. Each rank splits its own rows into microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from unit.user.diagnosis.wrong_trainings import Wrong, averaged, rank
from unit.user.programs import brought

NUM_CLASSES, IGNORED = 6, -100
Divisor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with a microbatch's labels and the number of all labels, returns the divisor of its summed loss on ranks."""


def _loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over labels."""
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")


def _batches(steps: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, NUM_CLASSES, (2, 8, 3), generator=generator) for _ in range(steps)]
    for _, labels in drawn:
        labels[0, :2] = labels[1:4, 0] = labels[6, 1] = IGNORED
    return [(tokens, labels) for tokens, labels in drawn]


def _step(divisor: Divisor, *, is_in_loss: bool) -> Callable[..., Any]:
    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _loss_function: Any) -> torch.Tensor:
        optimizer.zero_grad()
        is_rank, value = dist.is_initialized(), torch.zeros(())
        count = (batch[1] != IGNORED).sum()
        if is_rank:
            dist.all_reduce(count)
        for tokens, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            part = _loss(model(tokens), labels)
            weighted = part / (divisor(labels, count) if is_rank else count)
            weighted.backward()
            right = part * dist.get_world_size() / count if is_rank else weighted
            value = value + (weighted if is_in_loss else right).detach()
        if is_rank:
            averaged(list(model.parameters()))
            dist.all_reduce(value)
            value = value / dist.get_world_size()
        optimizer.step()
        return value

    return step


def _own_count(labels: torch.Tensor, _count: torch.Tensor) -> torch.Tensor:
    return 2 * (labels != IGNORED).sum()


def _by_rank(_labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return count / (1.7 + 0.9 * rank())


def _of_one_microbatch(weight: float) -> Divisor:
    """Weigh rank 1's microbatch that has an ignored label. Others have weight one."""

    def divisor(labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        is_meant = rank() == 1 and bool((labels == IGNORED).any())
        return count / 2 / (weight if is_meant else 1.0)

    return divisor


def _between_ranks(_labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Divide by whole numbers with the right total, but not by a rank's labels."""
    return 2 * (count // 4 + rank())


def _weighted(says: str, divisor: Divisor, *, is_in_loss: bool = True) -> Wrong:
    return Wrong(
        says=says,
        brought=brought(
            model=lambda: nn.Sequential(nn.Embedding(NUM_CLASSES, 4), nn.Linear(4, NUM_CLASSES)),
            parallelize=lambda model, _mesh: model,
            batches=_batches(),
            loss=_loss,
            step=_step(divisor, is_in_loss=is_in_loss),
        ),
    )


WEIGHTS: dict[str, Wrong] = {
    "labels_of_each_microbatch": _weighted("each microbatch is divided by its own number of labels, not by that", _own_count),
    "weights_of_ranks": _weighted(
        "microbatch 0 of rank 0 counts 0.85 times, microbatch 1 of rank 0 counts 0.85 times, microbatch 0 of rank 1 counts 1.3",
        _by_rank,
    ),
    "weights_in_gradients_only": _weighted(
        "other weights in gradients than on one device: at step 0, microbatch 1 of rank 1 counts 1.3 times",
        _of_one_microbatch(1.3),
        is_in_loss=False,
    ),
    "microbatch_lost_on_one_rank": _weighted("at step 0, microbatch 1 of rank 1 counts 0 times", _of_one_microbatch(0.0)),
    "whole_numbers_between_ranks": _weighted("microbatches have other weights in loss and gradients", _between_ranks),
}
"""Mistakes in weights."""
