"""Finds and changes optimizer state on emulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.mistake import Span


def act_in_span(ranks: EmulatedRanks, *, on: Collection[int], span: Span, action: Callable[[EmulatedRanks, int], None]) -> None:
    """Let the ranks in `on` call `action` before each update in the steps `span`."""

    def act(rank: int, step: int) -> None:
        if rank in on and step in span:
            action(ranks, rank)

    ranks.before_update.append(act)


def state_tensors(ranks: EmulatedRanks, rank: int) -> list[tuple[str, torch.Tensor]]:
    """Return pairs of a parameter's name and an optimizer state tensor in the parameter's shape."""
    return [(name, value) for name in ranks.parameters[rank] for value in state_of(ranks, rank, name)]


def state_of(ranks: EmulatedRanks, rank: int, name: str) -> list[torch.Tensor]:
    """Return the optimizer state tensors for a parameter that have the parameter's shape."""
    parameter = ranks.parameters[rank][name]
    found = ranks.optimizers[rank].state.get(parameter, {}).values()
    return [value for value in found if isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter.dim()]
