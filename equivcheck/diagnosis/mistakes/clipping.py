"""Mistakes in gradient clipping: a wrong norm, a wrong point in the step, wrong ranks, or no clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, norm_of
from equivcheck.diagnosis.evidence import Evidence, axis_combinations
from equivcheck.diagnosis.mistake import Change, Mistake, StepFacts
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause

Combined = Callable[[list[torch.Tensor], float], torch.Tensor]
"""Function to combine the ranks' norms into one norm, for a norm type."""
NormOf = Callable[[EmulatedRanks, int, Gradients, float], torch.Tensor]
"""Function to get the norm for clipping on a rank, from its gradients and the norm type."""
MAX_LEFT_OUT = 24
"""Maximum tensors to try as missing from the norm."""

_COMBINED: tuple[tuple[Combined, str], ...] = (
    (lambda norms, _kind: torch.stack(norms).sum(), "summed"),
    (lambda norms, _kind: torch.stack(norms).square().sum().sqrt(), "combined as the root of the sum of squares"),
    (lambda norms, _kind: torch.stack(norms).max(), "combined by their maximum"),
    (lambda norms, _kind: torch.stack(norms).mean(), "averaged"),
    (
        lambda norms, kind: torch.stack(norms).pow(kind).sum() if kind < torch.inf else norms[0],
        "summed as powers, without the root of the sum",
    ),
    (lambda norms, _kind: torch.stack(norms).max().sqrt(), "combined as the root of their maximum"),
    (lambda norms, _kind: torch.stack(norms).sum().sqrt(), "combined as the root of their sum"),
)


def wrong_clippings(diverged: Evidence, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in gradient clipping. Yields none if the single-device step does not clip."""
    if not facts.clips:
        return
    yield _scaling(Cause.NOT_CLIPPED, "gradients are not clipped", partial(_clip_on, on=()), is_quick=True)
    yield from _over_some_axes(diverged)
    for power, words in ((0.5, "the root of the norm"), (2.0, "the square of the norm")):
        yield _by(Cause.ANOTHER_NORM, f"gradients are clipped by {words}", partial(_powered, power=power), is_quick=True)
    for kind in (1.0, 2.0, torch.inf):
        yield _by(
            Cause.ANOTHER_NORM, f"gradients are clipped by their {kind:g}-norm", partial(_of_type, other=kind), is_quick=True
        )
    words = "gradients are clipped by the sum of the tensors' norms, not by the norm over all elements"
    yield _by(Cause.ANOTHER_NORM, words, _summed_over_tensors, is_quick=True)
    yield from _on_some_ranks(diverged)
    yield _scaling(Cause.PART_OF_NORM, "each tensor is clipped by its own norm", _clip_each, is_quick=True)
    if diverged.has_own_rows:
        words = "each rank clips the gradients of its own rows before they are reduced"
        yield Mistake(Cause.CLIPPED_BEFORE_REDUCTION, words, _clip_early, own_rows=True)
    for left in diverged.updated[:MAX_LEFT_OUT]:
        yield _by(Cause.PART_OF_NORM, f"the total norm leaves out `{left}`", partial(_without, left=left), is_quick=True)


def _by(cause: Cause, sentence: str, norm: NormOf, *, is_quick: bool = False) -> Mistake:
    return _scaling(cause, sentence, lambda ranks: setattr(ranks, "norm", partial(norm, ranks)), is_quick=is_quick)


def _scaling(cause: Cause, sentence: str, change: Change, *, is_quick: bool = False) -> Mistake:
    return Mistake(cause, sentence, change, is_quick=is_quick, scales_gradients=True)


def _clip_each(ranks: EmulatedRanks) -> None:
    ranks.clips_each = True


def _over_some_axes(diverged: Evidence) -> Iterator[Mistake]:
    subsets = axis_combinations(diverged.wide_axes)
    for lacking in subsets:
        kept = tuple(name for name in diverged.wide_axes if name not in lacking)
        words = f"the total norm is reduced over {diverged.ranks_text(kept)} only"
        words = words if kept else "each rank clips by its local norm, over the elements that it holds"
        yield _by(Cause.LOCAL_NORM, words, partial(local_norm, axes=kept))
    for holder in sorted({0, diverged.num_ranks - 1}) if subsets else ():
        words = f"all ranks clip by the norm over the elements that rank {holder} holds"
        yield _by(Cause.LOCAL_NORM, words, partial(_on_rank, holder=holder))
    for axes in subsets:
        words = f"the total norm counts gradients replicated over {diverged.ranks_text(axes)} once per rank"
        yield _by(Cause.REPLICAS_IN_NORM, words, partial(_counting_replicas, axes=axes), is_quick=axes == diverged.wide_axes)
    for axes in subsets:
        words = f"the total norm counts each gradient element once on each of {diverged.ranks_text(axes)}"
        yield _by(Cause.REPLICAS_IN_NORM, words, partial(_counting_each, times=diverged.size(axes)), is_quick=True)
    for axes in subsets:
        for way, words in _COMBINED:
            sentence = f"the local norms on {diverged.ranks_text(axes)} are {words}"
            yield _by(Cause.ANOTHER_NORM, sentence, _combined(axes, way))


def _held(ranks: EmulatedRanks, gradients: Gradients, holders: Sequence[int]) -> list[torch.Tensor]:
    return [value[ranks.held.by(name, *holders)] for name, value in gradients.items()]


def local_norm(ranks: EmulatedRanks, rank: int, gradients: Gradients, kind: float, *, axes: Sequence[str]) -> torch.Tensor:
    """Return the norm over elements on a rank and its peers along some axes."""
    return norm_of(_held(ranks, gradients, ranks.peers(rank, axes)), kind)


def _on_rank(ranks: EmulatedRanks, _rank: int, gradients: Gradients, kind: float, *, holder: int) -> torch.Tensor:
    return norm_of(_held(ranks, gradients, [holder]), kind)


def _combined(axes: Sequence[str], way: Combined) -> NormOf:
    def norm(ranks: EmulatedRanks, rank: int, gradients: Gradients, kind: float) -> torch.Tensor:
        return way([norm_of(_held(ranks, gradients, [peer]), kind) for peer in ranks.peers(rank, axes)], kind)

    return norm


def _counting_replicas(
    ranks: EmulatedRanks, rank: int, gradients: Gradients, kind: float, *, axes: Sequence[str]
) -> torch.Tensor:
    return norm_of([part for peer in ranks.peers(rank, axes) for part in _held(ranks, gradients, [peer])], kind)


def _counting_each(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, kind: float, *, times: int) -> torch.Tensor:
    return norm_of(gradients.values(), kind) * float(times ** (1 / kind))


def _powered(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, kind: float, *, power: float) -> torch.Tensor:
    return norm_of(gradients.values(), kind) ** power


def _of_type(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, _kind: float, *, other: float) -> torch.Tensor:
    return norm_of(gradients.values(), other)


def _summed_over_tensors(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, kind: float) -> torch.Tensor:
    return torch.stack([norm_of([value], kind) for value in gradients.values()]).sum()


def _on_some_ranks(diverged: Evidence) -> Iterator[Mistake]:
    count = diverged.num_ranks
    for one in range(count if count > 1 else 0):
        others = tuple(rank for rank in range(count) if rank != one)
        words = f"rank {one} does not clip its gradients, {'all others do' if len(others) > 1 else f'rank {others[0]} does'}"
        yield _scaling(Cause.NOT_CLIPPED, words, partial(_clip_on, on=others))
        if len(others) > 1:
            yield _scaling(Cause.NOT_CLIPPED, f"only rank {one} clips its gradients", partial(_clip_on, on=(one,)))


def _clip_on(ranks: EmulatedRanks, *, on: Sequence[int]) -> None:
    ranks.norm = lambda rank, gradients, kind: norm_of(gradients.values(), kind) * (1.0 if rank in on else 0.0)
    ranks.returns_total = True


def _without(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, kind: float, *, left: str) -> torch.Tensor:
    return norm_of([value for name, value in gradients.items() if name != left], kind)


def _clip_early(ranks: EmulatedRanks) -> None:
    """Bug: each rank clips its own gradients before the reduction.

    Clipping the mean again would not change it, because it is no larger.
    """
    ranks.gathers_gradients = False
    reduce = ranks.reduce
    ranks.reduce = lambda all_, _microbatch, _step: all_
    ranks.norm = lambda _rank, gradients, kind: norm_of(gradients.values(), kind)

    def average(rank: int, step: int) -> None:
        means = ranks.exchange(rank, ranks.gradients(rank), lambda all_: reduce(all_, 0, step))
        for name, value in ranks.parameters[rank].items():
            value.grad = means[name].clone() if name in means else None

    ranks.after_clipping.append(average)
