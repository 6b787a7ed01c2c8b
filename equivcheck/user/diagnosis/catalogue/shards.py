"""Optimizers that treat each rank's shard as the full tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, held_elements
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts
from equivcheck.worlds.trace.differences import Phase


def local_statistics(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield an optimizer whose norms, means and factors cover only a shard."""
    if held_elements(diverged).is_sharded and diverged.first.phase in (Phase.UPDATE, Phase.STATE):
        words = "the optimizer treats each rank's shard as the full tensor, so its statistics cover one shard only"
        yield Mistake(Cause.LOCAL_STATISTICS, words, _update_shards)


def _update_shards(ranks: EmulatedUserRanks) -> None:
    """Cut parameters, gradients and state to the rank's shard while the optimizer runs."""
    whole: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def cut(rank: int, _step: int) -> None:
        for name, value, box in _boxes(ranks, rank):
            whole[rank, name] = value.data, value.grad
            value.grad = None
            for key, kept in _shaped_alike(ranks, rank, value):
                ranks.optimizers[rank].state[value][key] = kept[box].clone()
            grad = whole[rank, name][1]
            value.data = value.data[box].clone()
            value.grad = None if grad is None else grad[box].clone()

    def put_back(rank: int, _step: int) -> None:
        for name, value, box in _boxes(ranks, rank):
            data, grad = whole.pop((rank, name))
            data[box] = value.data
            for key, kept in _shaped_alike(ranks, rank, value):
                ranks.optimizers[rank].state[value][key] = torch.zeros_like(data)
                ranks.optimizers[rank].state[value][key][box] = kept
            value.grad = None
            value.data, value.grad = data, grad

    ranks.before_update.append(cut)
    ranks.after_update.append(put_back)


def _boxes(ranks: EmulatedUserRanks, rank: int) -> list[tuple[str, torch.Tensor, tuple[slice, ...]]]:
    found = []
    for name, value in ranks.parameters[rank].items():
        where = ranks.held.by(name, rank).nonzero()
        first, last = (where.min(0).values.tolist(), where.max(0).values.tolist()) if len(where) else ([0], [-1])
        found.append((name, value, tuple(slice(start, end + 1) for start, end in zip(first, last, strict=True))))
    return found


def _shaped_alike(ranks: EmulatedUserRanks, rank: int, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """State in the parameter's current shape."""
    state = ranks.optimizers[rank].state.get(value, {})
    return [(key, kept) for key, kept in state.items() if isinstance(kept, torch.Tensor) and kept.shape == value.shape]
