"""Mistakes with shards: assigned to wrong ranks, or treated as full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.held_elements import HeldElements, held_elements
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Training
from equivcheck.training.setup import Setup
from equivcheck.training.update.optimizer import build_optimizer


def local_statistics(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield a mistake: the optimizer computes its statistics from each rank's shard, and not from the full tensor.

    Yields none if the optimizer is elementwise or all tensors are replicated.
    """
    if not diverged.training.optimizer.elementwise and held_elements(diverged).is_sharded:
        words = "the optimizer treats each rank's shard as the full tensor, so its statistics cover one shard only"
        yield on_one_device(Cause.LOCAL_STATISTICS, words, partial(_by_shards, held=held_elements(diverged)))


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    whole: torch.nn.Parameter
    box: tuple[slice, ...]
    own: torch.nn.Parameter
    optimizer: torch.optim.Optimizer


def _by_shards(setup: Setup, held: HeldElements) -> None:
    shards = [
        shard for name, parameter in setup.model.named_parameters() for shard in _shards(setup.training, name, parameter, held)
    ]

    def update(optimizer: torch.optim.Optimizer) -> None:
        rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        for shard in shards:
            if shard.whole.grad is not None:
                _update(shard, optimizer, rates[shard.whole])

    setup.update = update


def _shards(training: Training, name: str, parameter: torch.nn.Parameter, held: HeldElements) -> Iterator[_Shard]:
    """Yield one entry for each distinct shard."""
    boxes = dict.fromkeys(_box(held.by(name, rank)) for rank in range(held.num_ranks))
    for bounds in boxes:
        if bounds is None:
            continue
        box = tuple(slice(start, end) for start, end in bounds)
        own = torch.nn.Parameter(parameter.detach()[box].clone())
        yield _Shard(parameter, box, own, build_optimizer(training, [(name, own)]))


def _box(elements: torch.Tensor) -> tuple[tuple[int, int], ...] | None:
    """Return the bounding box of the held elements: start and end along each dim. None if no elements are held."""
    where = elements.nonzero()
    if not len(where):
        return None
    first, last = where.min(0).values.tolist(), where.max(0).values.tolist()
    return tuple((start, end + 1) for start, end in zip(first, last, strict=True))


def _update(shard: _Shard, optimizer: torch.optim.Optimizer, rate: float) -> None:
    assert shard.whole.grad is not None, "only parameters with gradients are updated"
    shard.own.grad = shard.whole.grad[shard.box].clone()
    shard.own.data.copy_(shard.whole.data[shard.box])
    for group in shard.optimizer.param_groups:
        group["lr"] = rate
    shard.optimizer.step()
    shard.whole.data[shard.box] = shard.own.data
    state = optimizer.state[shard.whole]
    for key, value in shard.optimizer.state[shard.own].items():
        if isinstance(value, torch.Tensor) and value.shape == shard.own.shape:
            state.setdefault(key, torch.zeros_like(shard.whole.data))[shard.box] = value
        else:
            state[key] = value
