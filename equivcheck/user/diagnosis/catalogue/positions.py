"""Mistakes in modules whose positions are split over ranks, such as norms under sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from equivcheck.diagnosis.words import gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining, wrong_elements
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.worlds.trace.differences import Phase

_DIMS = (1, 0)
"""A module's output may be split into positions along dim 1, or along dim 0."""


def wrong_positions(diverged: DivergedTraining, _honest: Honest) -> Iterator[Counterfactual]:
    """Yield unreduced gradients for each axis whose ranks have the same rows."""
    names = tuple(name for name in wrong_elements(diverged, Phase.GRADIENT) if name in diverged.updated)
    for axis in (name for name in diverged.wide_axes if name not in diverged.data_axes):
        for dim in _DIMS if names else ():
            what, where = gradients(diverged, names), diverged.over((axis,))
            yield Counterfactual(
                cause=Cause.NOT_REDUCED,
                sentence=f"{what} not summed over {where}: each rank keeps the gradient of its own part of dim {dim}",
                change=_of_own_positions(names, axis, dim),
            )


def _of_own_positions(names: tuple[str, ...], axis: str, dim: int) -> Change:
    by_owner: dict[str, list[str]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        by_owner.setdefault(owner, []).append(own)

    def change(ranks: EmulatedRanks) -> None:
        for rank, model in enumerate(ranks.models):
            for owner, own in by_owner.items():
                _compute_in_parts(
                    _Parted(ranks=ranks, rank=rank, module=model.get_submodule(owner), names=own, axis=axis, dim=dim)
                )

    return change


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parted:
    """One rank's module, computed in parts by all ranks."""

    ranks: EmulatedRanks
    rank: int
    module: Any
    names: list[str]
    """Parameters whose gradient covers only the rank's own part."""
    axis: str
    dim: int


def _compute_in_parts(parted: _Parted) -> None:
    """Concatenate each rank's part of the output, computed with its own parameters."""
    module, forward = parted.module, parted.module.forward
    peers = parted.ranks.peers(parted.rank, (parted.axis,))

    def in_parts(*inputs: Any, **keywords: Any) -> torch.Tensor:
        own = {name: getattr(module, name).detach().clone() for name in parted.names}
        given = parted.ranks.exchange(parted.rank, own, lambda all_: [all_] * len(all_))
        module.forward = forward
        try:
            outputs = [
                module(*inputs, **keywords) if peer == parted.rank else functional_call(module, given[peer], inputs, keywords)
                for peer in peers
            ]
        finally:
            module.forward = in_parts
        parts = [output.chunk(len(peers), dim=parted.dim) for output in outputs]
        return torch.cat([each[number] for number, each in enumerate(parts) if number < len(each)], dim=parted.dim)

    module.forward = in_parts
