"""Mistakes in gradient clipping: wrong norm, wrong moment, wrong ranks, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, axis_subsets
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.interception import norm_of
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts

Combined = Callable[[list[torch.Tensor], float], torch.Tensor]
"""Combines the ranks' norms into one, for a norm type."""
NormOf = Callable[[EmulatedUserRanks, int, Gradients, float], torch.Tensor]
"""Returns the norm for clipping on a rank, from its gradients and the norm type."""
MAX_LEFT_OUT = 24
"""Largest number of tensors to try as missing from the norm."""

_COMBINED: tuple[tuple[Combined, str], ...] = (
    (lambda norms, _kind: torch.stack(norms).sum(), "summed"),
    (lambda norms, _kind: torch.stack(norms).square().sum().sqrt(), "combined as the root of the sum of squares"),
    (lambda norms, _kind: torch.stack(norms).max(), "combined by their maximum"),
    (lambda norms, _kind: torch.stack(norms).mean(), "averaged"),
    (lambda norms, kind: torch.stack(norms).pow(kind).sum() if kind < torch.inf else norms[0], "summed without a root"),
    (lambda norms, _kind: torch.stack(norms).max().sqrt(), "combined as the root of their maximum"),
    (lambda norms, _kind: torch.stack(norms).sum().sqrt(), "combined as the root of their sum"),
)


def wrong_clippings(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield clipping mistakes if the single-device step clips."""
    if not facts.clips:
        return
    yield _by(Cause.NOT_CLIPPED, "gradients are not clipped", lambda *_: torch.zeros((), dtype=torch.float64))
    yield from _over_some_axes(diverged)
    for power, words in ((0.5, "the root of the norm"), (2.0, "the square of the norm")):
        yield _by(Cause.ANOTHER_NORM, f"gradients are clipped by {words}", partial(_powered, power=power))
    for kind in (1.0, 2.0, torch.inf):
        yield _by(Cause.ANOTHER_NORM, f"gradients are clipped by their {kind:g}-norm", partial(_of_type, other=kind))
    yield from _on_some_ranks(diverged)
    yield Mistake(Cause.PART_OF_NORM, "each tensor is clipped by its own norm", lambda ranks: setattr(ranks, "clips_each", True))
    if diverged.has_own_rows:
        words = "each rank clips the gradients of its own rows before they are reduced"
        for again, more in ((False, ""), (True, ", and again afterwards")):
            yield Mistake(Cause.CLIPPED_BEFORE_REDUCTION, words + more, partial(_clip_early, again=again), own_rows=True)
    for left in diverged.updated[:MAX_LEFT_OUT]:
        yield _by(Cause.PART_OF_NORM, f"the total norm leaves out `{left}`", partial(_without, left=left))


def _by(cause: Cause, sentence: str, norm: NormOf) -> Mistake:
    return Mistake(cause, sentence, lambda ranks: setattr(ranks, "norm", partial(norm, ranks)))


def _over_some_axes(diverged: DivergedTraining) -> Iterator[Mistake]:
    subsets = axis_subsets(diverged.wide_axes)
    for lacking in subsets:
        kept = tuple(name for name in diverged.wide_axes if name not in lacking)
        words = "each rank clips by its local norm, over the elements that it holds"
        words = f"the total norm is reduced over {diverged.ranks_text(kept)} only" if kept else words
        yield _by(Cause.LOCAL_NORM, words, partial(_local, axes=kept))
    for axes in subsets:
        words = f"the total norm counts gradients replicated over {diverged.ranks_text(axes)} once per rank"
        yield _by(Cause.REPLICAS_IN_NORM, words, partial(_counting_replicas, axes=axes))
    for axes in subsets:
        for way, words in _COMBINED:
            sentence = f"the local norms on {diverged.ranks_text(axes)} are {words}"
            yield _by(Cause.ANOTHER_NORM, sentence, _combined(axes, way))


def _held(ranks: EmulatedUserRanks, gradients: Gradients, holders: Sequence[int]) -> list[torch.Tensor]:
    return [value[ranks.held.by(name, *holders)] for name, value in gradients.items()]


def _local(ranks: EmulatedUserRanks, rank: int, gradients: Gradients, kind: float, *, axes: Sequence[str]) -> torch.Tensor:
    return norm_of(_held(ranks, gradients, ranks.peers(rank, axes)), kind)


def _combined(axes: Sequence[str], way: Combined) -> NormOf:
    def norm(ranks: EmulatedUserRanks, rank: int, gradients: Gradients, kind: float) -> torch.Tensor:
        return way([norm_of(_held(ranks, gradients, [peer]), kind) for peer in ranks.peers(rank, axes)], kind)

    return norm


def _counting_replicas(
    ranks: EmulatedUserRanks, rank: int, gradients: Gradients, kind: float, *, axes: Sequence[str]
) -> torch.Tensor:
    return norm_of([part for peer in ranks.peers(rank, axes) for part in _held(ranks, gradients, [peer])], kind)


def _powered(_ranks: EmulatedUserRanks, _rank: int, gradients: Gradients, kind: float, *, power: float) -> torch.Tensor:
    return norm_of(gradients.values(), kind) ** power


def _of_type(_ranks: EmulatedUserRanks, _rank: int, gradients: Gradients, _kind: float, *, other: float) -> torch.Tensor:
    return norm_of(gradients.values(), other)


def _on_some_ranks(diverged: DivergedTraining) -> Iterator[Mistake]:
    count = diverged.task.num_ranks
    for one in range(count):
        others = tuple(rank for rank in range(count) if rank != one)
        words = f"rank {one} does not clip its gradients, {'all others do' if len(others) > 1 else f'rank {others[0]} does'}"
        yield _by(Cause.NOT_CLIPPED, words, partial(_unclipped, on=(one,)))
        if len(others) > 1:
            yield _by(Cause.NOT_CLIPPED, f"only rank {one} clips its gradients", partial(_unclipped, on=others))


def _unclipped(_ranks: EmulatedUserRanks, rank: int, gradients: Gradients, kind: float, *, on: Sequence[int]) -> torch.Tensor:
    return norm_of(gradients.values(), kind) * (0.0 if rank in on else 1.0)


def _without(_ranks: EmulatedUserRanks, _rank: int, gradients: Gradients, kind: float, *, left: str) -> torch.Tensor:
    return norm_of([value for name, value in gradients.items() if name != left], kind)


def _clip_early(ranks: EmulatedUserRanks, *, again: bool) -> None:
    """Clip each rank's own gradients, then reduce."""
    reduce = ranks.reduce
    ranks.reduce = lambda all_, _microbatch, _step: all_
    ranks.norm = lambda _rank, gradients, kind: norm_of(gradients.values(), kind)

    def average(rank: int, step: int) -> None:
        means = ranks.exchange(rank, ranks.gradients(rank), lambda all_: reduce(all_, 0, step))
        for name, value in ranks.parameters[rank].items():
            value.grad = means.get(name)
        if again:
            ranks.clip_again(rank, norm_of(means.values(), ranks.kind))

    ranks.after_clipping.append(average)
