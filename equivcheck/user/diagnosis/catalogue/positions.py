"""Mistakes in modules whose positions are split over ranks, such as norms under sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.func import functional_call

from equivcheck.diagnosis.words import gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, wrong_elements
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts
from equivcheck.worlds.trace.differences import Phase

_DIMS = (1, 0)
"""A module's output may be split into positions along dim 1, or along dim 0."""


def wrong_positions(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield unreduced gradients for each axis whose ranks have the same rows."""
    names = tuple(name for name in wrong_elements(diverged, Phase.GRADIENT) if name in diverged.updated)
    for axis in diverged.same_row_axes:
        for dim in _DIMS if names else ():
            what, where = gradients(diverged, names), diverged.ranks_text((axis,))
            words = f"{what} not summed over {where}: each rank keeps the gradient of its own part of dim {dim}"
            yield Mistake(Cause.NOT_REDUCED, words, partial(_split_positions, names=names, axis=axis, dim=dim))


def _split_positions(ranks: EmulatedUserRanks, *, names: tuple[str, ...], axis: str, dim: int) -> None:
    by_owner: dict[str, list[str]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        by_owner.setdefault(owner, []).append(own)
    for rank, model in enumerate(ranks.models):
        for owner, own_names in by_owner.items():
            module: Any = model.get_submodule(owner)
            module.forward = _InParts(ranks, rank, module, module.forward, own_names, axis, dim)


@dataclass(frozen=True, slots=True)
class _InParts:
    """A module's forward that concatenates each rank's part of the output, computed with its own parameters."""

    ranks: EmulatedUserRanks
    rank: int
    module: Any
    forward: Callable[..., Any]
    names: list[str]
    axis: str
    dim: int

    def __call__(self, *inputs: Any, **keywords: Any) -> torch.Tensor:
        module, peers = self.module, self.ranks.peers(self.rank, (self.axis,))
        own = {name: getattr(module, name).detach().clone() for name in self.names}
        given = self.ranks.exchange(self.rank, own, lambda all_: [all_] * len(all_))
        module.forward = self.forward
        try:
            outputs = [
                module(*inputs, **keywords) if peer == self.rank else functional_call(module, given[peer], inputs, keywords)
                for peer in peers
            ]
        finally:
            module.forward = self
        parts = [output.chunk(len(peers), dim=self.dim) for output in outputs]
        return torch.cat([each[number] for number, each in enumerate(parts) if number < len(each)], dim=self.dim)
