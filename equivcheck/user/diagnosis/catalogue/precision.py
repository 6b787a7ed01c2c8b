"""Mistakes in precision: gradients reduced, or parameters stored, with fewer digits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks

TYPES = ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32"))


def narrower(diverged: DivergedTraining) -> list[tuple[torch.dtype, str]]:
    """Return the element types with fewer digits than the training, with their names."""
    return [(kind, name) for kind, name in TYPES if torch.finfo(kind).eps > diverged.eps]


def lower_precision(diverged: DivergedTraining, _honest: Honest) -> Iterator[Counterfactual]:
    """Yield reductions, gradients and parameters with fewer digits."""
    for kind, name in narrower(diverged):
        if diverged.shares and diverged.data_axes:
            for before in (False, True):
                words = f"gradients are reduced in {name}"
                change = _reducing(kind, before=before)
                yield Counterfactual(cause=Cause.REDUCED_IN_LOWER_PRECISION, sentence=words, change=change, own_rows=True)
        words = f"gradients are rounded to {name}"
        yield Counterfactual(cause=Cause.REDUCED_IN_LOWER_PRECISION, sentence=words, change=_rounding(kind))
        words = f"parameters are kept in {name} between steps"
        yield Counterfactual(cause=Cause.MASTERS_IN_LOWER_PRECISION, sentence=words, change=_keeping(kind))


def _reducing(kind: torch.dtype, *, before: bool) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        def mean(gradients: list[Gradients], peers: list[int], name: str) -> torch.Tensor:
            values = [gradients[peer][name].to(kind) for peer in peers if name in gradients[peer]]
            values = [value / len(peers) for value in values] if before else values
            total = values[0].clone()
            for value in values[1:]:
                total += value
            return (total if before else total / len(peers)).to(gradients[peers[0]][name].dtype)

        def reduce(all_: list[Gradients], _microbatch: int, _step: int) -> list[Gradients]:
            peers = [ranks.peers(rank, ranks.axes) for rank in range(len(all_))]
            return [{name: mean(all_, of_rank, name) for name in all_[of_rank[0]]} for of_rank in peers]

        ranks.reduce = reduce

    return change


def _rounding(kind: torch.dtype) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        def rounded(rank: int, _step: int) -> None:
            for value in ranks.gradients(rank).values():
                value.copy_(value.to(kind))

        ranks.after_backward.append(rounded)

    return change


def _keeping(kind: torch.dtype) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        def rounded(rank: int, _step: int) -> None:
            for value in ranks.parameters[rank].values():
                value.data.copy_(value.data.to(kind))

        ranks.after_update.append(rounded)

    return change
