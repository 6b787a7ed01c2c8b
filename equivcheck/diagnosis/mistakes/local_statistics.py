"""Mistakes in optimizers that compute statistics from a shard."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import UPDATED, Mistake, StepFacts
from equivcheck.oracle.verdict.cause import Cause


def local_statistics(diverged: Evidence, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: an optimizer treats a rank's shard as the full tensor.

    Statistics such as norms and means then cover only this shard.
    """
    if held_elements(diverged).is_sharded and diverged.first.phase in UPDATED:
        words = "the optimizer treats each rank's shard as the full tensor, so its statistics cover one shard only"
        yield Mistake(Cause.LOCAL_STATISTICS, words, _update_shards)


def _update_shards(ranks: EmulatedRanks) -> None:
    """Cut parameters, gradients and state to the rank's shard while the optimizer runs."""
    full: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def cut(rank: int, _step: int) -> None:
        for name, value, box in _boxes(ranks, rank):
            full[rank, name] = value.data, value.grad
            value.grad = None
            for key, kept in _state_in_shape(ranks, rank, value):
                ranks.optimizers[rank].state[value][key] = kept[box].clone()
            grad = full[rank, name][1]
            value.data = value.data[box].clone()
            value.grad = None if grad is None else grad[box].clone()

    def put_back(rank: int, _step: int) -> None:
        for name, value, box in _boxes(ranks, rank):
            data, grad = full.pop((rank, name))
            data[box] = value.data
            for key, kept in _state_in_shape(ranks, rank, value):
                ranks.optimizers[rank].state[value][key] = torch.zeros_like(data)
                ranks.optimizers[rank].state[value][key][box] = kept
            value.grad = None
            value.data, value.grad = data, grad

    ranks.before_update.append(cut)
    ranks.after_update.append(put_back)


def _boxes(ranks: EmulatedRanks, rank: int) -> list[tuple[str, torch.Tensor, tuple[slice, ...]]]:
    found = []
    for name, value in ranks.parameters[rank].items():
        where = ranks.held.by(name, rank).nonzero()
        first, last = (where.min(0).values.tolist(), where.max(0).values.tolist()) if len(where) else ([0], [-1])
        found.append((name, value, tuple(slice(start, end + 1) for start, end in zip(first, last, strict=True))))
    return found


def _state_in_shape(ranks: EmulatedRanks, rank: int, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer state that has the parameter's current shape, with names."""
    state = ranks.optimizers[rank].state.get(value, {})
    return [(key, kept) for key, kept in state.items() if isinstance(kept, torch.Tensor) and kept.shape == value.shape]
