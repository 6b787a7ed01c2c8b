"""Shards that are taken for one another, or each for a whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone
from equivcheck.diagnosis.gathering import Gathering, gathering_of
from equivcheck.scenario import Training
from equivcheck.train.optimizer import build_optimizer
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause


def wrong_shards(case: Case) -> Iterator[Counterfactual]:
    """Gradients of another rank's shard."""
    if case.scenario.start is not None or not gathering_of(case).is_sharded:
        return
    gathering, count = gathering_of(case), case.scenario.layout.mesh.num_ranks
    for shift in range(1, count):
        words = f"each rank's shards of gradients are those of the rank {shift} after it"
        yield alone(case, Cause.PERMUTED, words, _with_gradients_of(gathering, count, shift))


def local_statistics(case: Case) -> Iterator[Counterfactual]:
    """An optimizer that is not elementwise updates each shard as if it were all of the tensor."""
    if case.scenario.training.optimizer.elementwise or case.scenario.start is not None or not gathering_of(case).is_sharded:
        return
    words = "the optimizer's statistics over a tensor are those of each rank's shard"
    change = _by_shards(gathering_of(case), case.scenario.layout.mesh.num_ranks)
    yield alone(case, Cause.LOCAL_STATISTICS, words, change)


def swap(value: torch.Tensor, gathering: Gathering, name: str, num_ranks: int, source_of: Callable[[int], int]) -> None:
    """Give each rank's elements those of another, in place, where both hold as many."""
    before = value.clone()
    for rank in range(num_ranks):
        mine, theirs = gathering.held(name, rank), gathering.held(name, source_of(rank) % num_ranks)
        if int(mine.sum()) == int(theirs.sum()):
            value[mine] = before[theirs]


def _with_gradients_of(gathering: Gathering, num_ranks: int, shift: int) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        def shifted(_optimizer: torch.optim.Optimizer, _step: int) -> None:
            for name, parameter in setup.model.named_parameters():
                if parameter.grad is not None:
                    swap(parameter.grad, gathering, name, num_ranks, lambda rank: rank + shift)

        setup.before_update.append(shifted)

    return change


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    whole: torch.nn.Parameter
    box: tuple[slice, ...]
    own: torch.nn.Parameter
    optimizer: torch.optim.Optimizer


def _by_shards(gathering: Gathering, num_ranks: int) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        shards = [
            shard
            for name, parameter in setup.model.named_parameters()
            for shard in _shards(setup.training, name, parameter, gathering, num_ranks)
        ]

        def update(optimizer: torch.optim.Optimizer) -> None:
            rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
            for shard in shards:
                if shard.whole.grad is not None:
                    _update(shard, optimizer, rates[shard.whole])

        setup.update = update

    return change


def _shards(
    training: Training, name: str, parameter: torch.nn.Parameter, gathering: Gathering, num_ranks: int
) -> Iterator[_Shard]:
    """One for each distinct part that a rank holds of a parameter."""
    boxes = dict.fromkeys(_box(gathering.held(name, rank)) for rank in range(num_ranks))
    for bounds in filter(None, boxes):
        box = tuple(slice(start, end) for start, end in bounds)
        own = torch.nn.Parameter(parameter.detach()[box].clone())
        yield _Shard(parameter, box, own, build_optimizer(training, [(name, own)]))


def _box(held: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """First index and the one after the last of the elements that are held along each dim; empty for none."""
    where = held.nonzero()
    if not len(where):
        return ()
    first, last = where.min(0).values.tolist(), where.max(0).values.tolist()
    return tuple((start, end + 1) for start, end in zip(first, last, strict=True))


def _update(shard: _Shard, optimizer: torch.optim.Optimizer, rate: float) -> None:
    assert shard.whole.grad is not None, "only what has a gradient is updated"
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
