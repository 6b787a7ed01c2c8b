"""Bias with which routers choose experts. It is updated once a step by how many positions chose each expert.

The counts of a step are a sum over its microbatches, and over all ranks with other rows or positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.training.layers.experts.module import Router

SumCounts = Callable[[torch.Tensor], torch.Tensor]
"""Function that sums one layer's counts over ranks."""


def biased_routers(model: nn.Module) -> Iterator[Router]:
    """Yield the model's routers that have a bias, in the order of the layers."""
    return (module for module in model.modules() if isinstance(module, Router) and module.layer.router_bias_rate)


def count_choices(model: nn.Module) -> None:
    """Add each router's counts from the last forward to its counts of the step.

    Call this once after each forward, so that activation checkpointing's recomputed forward is not counted again.
    """
    for router in biased_routers(model):
        assert router.counts is not None, "forward has run"
        add_counts(router, router.counts)


def count_recorded_choices(model: nn.Module, chosen: Sequence[torch.Tensor]) -> None:
    """Add recorded masks of selected experts, (..., experts), to the counts of the step. `chosen` has one for each router."""
    for router, mask in zip((each for each in model.modules() if isinstance(each, Router)), chosen, strict=True):
        if router.layer.router_bias_rate:
            add_counts(router, mask.to(torch.float32).flatten(0, -2).sum(0))


def add_counts(router: Router, counts: torch.Tensor) -> None:
    """Add counts (experts,) to a router's counts of the step."""
    router.counts_of_step = counts if router.counts_of_step is None else router.counts_of_step + counts


def update_router_biases(model: nn.Module, sum_counts: SumCounts) -> None:
    """Update each router's bias by its counts of the step, and forget these counts.

    Experts with fewer positions than the mean are chosen more often afterwards, and others less often.
    """
    for router in biased_routers(model):
        counts = sum_counts(_taken_counts(router))
        router.expert_bias.add_(torch.sign(counts.mean() - counts), alpha=router.layer.router_bias_rate)


def _taken_counts(router: Router) -> torch.Tensor:
    """Return a router's counts of the step, zeros if it computed nothing. Partial sums of DTensors are reduced."""
    counts, router.counts_of_step = router.counts_of_step, None
    if counts is None:
        return torch.zeros_like(router.expert_bias)
    return counts.full_tensor() if isinstance(counts, DTensor) else counts.clone()
