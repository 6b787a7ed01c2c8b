"""Mistakes in precision: gradients reduced, or parameters stored, with fewer digits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.layouts.base.rounding import EACH, ONCE, WHOLE, WhenReduced
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause

TYPES = ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32"))


def narrower_types(diverged: Evidence) -> list[tuple[torch.dtype, str]]:
    """Return the element types with fewer digits than the training's type, with their names."""
    return [(kind, name) for kind, name in TYPES if torch.finfo(kind).eps > diverged.eps]


def lower_precision(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes: gradients are reduced, accumulated or stored in a narrower type, or parameters are stored in it."""
    for kind, name in narrower_types(diverged):
        times = (EACH, WHOLE, ONCE) if facts.num_backward > 1 else (EACH,)
        for when, before in product(times, (False, True)) if diverged.has_own_rows else ():
            change = partial(_reduce_in, kind=kind, when=when, before=before)
            yield Mistake(Cause.REDUCED_IN_LOWER_PRECISION, f"gradients are reduced in {name}", change, own_rows=True)
        for of_each, of_sum in product((True, False), repeat=2) if facts.num_backward > 1 else ():
            change = partial(_accumulate_in, kind=kind, of_each=of_each, of_sum=of_sum)
            words = f"gradients are accumulated in {name}"
            yield Mistake(Cause.REDUCED_IN_LOWER_PRECISION, words, change, own_rows=not of_sum and diverged.has_own_rows)
        words = f"gradients are rounded to {name}"
        yield Mistake(Cause.REDUCED_IN_LOWER_PRECISION, words, partial(_round_gradients, kind=kind), is_quick=True)
        words = f"parameters are kept in {name} between steps"
        for at_start, more in ((False, ""), (True, ", including their initial values")):
            change = partial(_round_parameters, kind=kind, at_start=at_start)
            yield Mistake(Cause.MASTERS_IN_LOWER_PRECISION, words + more, change, is_quick=True)


def _reduce_in(ranks: EmulatedRanks, *, kind: torch.dtype, when: WhenReduced, before: bool) -> None:
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

    ranks.reduce, ranks.when = reduce, when


def _accumulate_in(ranks: EmulatedRanks, *, kind: torch.dtype, of_each: bool, of_sum: bool) -> None:
    """Bug: round the accumulated gradient after each microbatch.

    `of_each` rounds each microbatch's gradient as well. `of_sum` reduces each microbatch's gradient before it is accumulated.
    """
    sums: list[Gradients] = [{} for _ in ranks.models]

    def add(total: Gradients, fresh: Gradients) -> Gradients:
        """Add gradients to the sums in `total`, in the narrower type. Returns by how much each sum changed."""
        added = {}
        for name, value in fresh.items():
            before = total.get(name, torch.zeros_like(value))
            total[name] = (before + (value.to(kind) if of_each else value)).to(kind).to(value.dtype)
            added[name] = total[name] - before
        return added

    def reduce(all_: list[Gradients], microbatch: int, step: int) -> list[Gradients]:
        if microbatch == 0:
            for total in sums:
                total.clear()
        given = ranks.mean(all_, microbatch, step) if of_sum else all_
        added = [add(total, fresh) for total, fresh in zip(sums, given, strict=True)]
        return added if of_sum else ranks.mean(added, microbatch, step)

    ranks.reduce = reduce


def _round_gradients(ranks: EmulatedRanks, *, kind: torch.dtype) -> None:
    def round_gradients(rank: int, _step: int) -> None:
        for value in ranks.gradients(rank).values():
            value.copy_(value.to(kind))

    ranks.after_backward.append(round_gradients)


def _round_parameters(ranks: EmulatedRanks, *, kind: torch.dtype, at_start: bool) -> None:
    def round_parameters(rank: int, _step: int) -> None:
        for value in ranks.parameters[rank].values():
            value.data.copy_(value.data.to(kind))

    ranks.after_update.append(round_parameters)
    for rank in range(len(ranks.models) if at_start else 0):
        round_parameters(rank, 0)
