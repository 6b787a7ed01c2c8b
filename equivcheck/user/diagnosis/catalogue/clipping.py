"""Mistakes in gradient clipping: wrong norm, wrong moment, wrong ranks, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining, choices
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.user.diagnosis.interception import norm_of

Combined = Callable[[list[torch.Tensor], float], torch.Tensor]
"""Combines the ranks' norms into one, for a norm type."""
NormOf = Callable[[EmulatedRanks, int, Gradients, float], torch.Tensor]
"""Returns the norm for clipping on a rank, from its gradients and the norm type."""
MAX_LEFT_OUT = 24
"""Largest number of tensors to try as missing from the norm."""


def wrong_clippings(diverged: DivergedTraining, honest: Honest) -> Iterator[Counterfactual]:
    """Yield clipping mistakes if the single-device step calls `clip_grad_norm_`."""
    if not honest.clips:
        return
    yield _by(Cause.NOT_CLIPPED, "gradients are not clipped", _zero)
    yield from _shards(diverged)
    yield from _replicas(diverged)
    yield from _put_together()
    yield from _kinds()
    yield from _on_some_ranks(diverged)
    yield Counterfactual(cause=Cause.PART_OF_NORM, sentence="each tensor is clipped by its own norm", change=_each)
    if diverged.shares and diverged.data_axes:
        words = "each rank clips the gradients of its own rows before they are reduced"
        for again, more in ((False, ""), (True, ", and again afterwards")):
            yield Counterfactual(
                cause=Cause.CLIPPED_BEFORE_REDUCTION, sentence=words + more, change=_early(again=again), own_rows=True
            )
    yield from _left_out(diverged)


def _by(cause: Cause, sentence: str, norm: NormOf) -> Counterfactual:
    def change(ranks: EmulatedRanks) -> None:
        ranks.norm = lambda rank, gradients, kind: norm(ranks, rank, gradients, kind)

    return Counterfactual(cause=cause, sentence=sentence, change=change)


def _zero(_ranks: EmulatedRanks, _rank: int, _gradients: Gradients, _kind: float) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


def _each(ranks: EmulatedRanks) -> None:
    ranks.clips_each = True


def _held(ranks: EmulatedRanks, gradients: Gradients, holders: Sequence[int]) -> list[torch.Tensor]:
    return [value[ranks.held.by(name, *holders)] for name, value in gradients.items()]


def _shards(diverged: DivergedTraining) -> Iterator[Counterfactual]:
    """Norms over one rank's shards, or over the ranks along some axes."""
    for lacking in choices(diverged.wide_axes):
        kept = tuple(name for name in diverged.wide_axes if name not in lacking)
        words = (
            f"the total norm is reduced over {diverged.over(kept)} only"
            if kept
            else "each rank clips by its local norm, over the elements that it holds"
        )

        def local(ranks: EmulatedRanks, rank: int, gradients: Gradients, kind: float, kept: Sequence[str] = kept) -> torch.Tensor:
            return norm_of(_held(ranks, gradients, ranks.peers(rank, kept)), kind)

        yield _by(Cause.LOCAL_NORM, words, local)
    ways: tuple[tuple[Combined, str], ...] = (
        (lambda norms, _kind: torch.stack(norms).sum(), "summed"),
        (lambda norms, _kind: torch.stack(norms).square().sum().sqrt(), "combined as the root of the sum of squares"),
        (lambda norms, _kind: torch.stack(norms).max(), "combined by their maximum"),
        (lambda norms, _kind: torch.stack(norms).mean(), "averaged"),
        (
            lambda norms, kind: torch.stack(norms).pow(kind).sum() if kind < torch.inf else norms[0],
            "summed without a root",
        ),
        (lambda norms, _kind: torch.stack(norms).max().sqrt(), "combined as the root of their maximum"),
        (lambda norms, _kind: torch.stack(norms).sum().sqrt(), "combined as the root of their sum"),
    )
    for chosen in choices(diverged.wide_axes):
        for way, words in ways:
            sentence = f"the local norms on {diverged.over(chosen)} are {words}"
            yield _by(Cause.ANOTHER_NORM, sentence, _combining(chosen, way))


def _combining(axes: Sequence[str], way: Combined) -> NormOf:
    def combined(ranks: EmulatedRanks, rank: int, gradients: Gradients, kind: float) -> torch.Tensor:
        return way([norm_of(_held(ranks, gradients, [peer]), kind) for peer in ranks.peers(rank, axes)], kind)

    return combined


def _replicas(diverged: DivergedTraining) -> Iterator[Counterfactual]:
    """Replicated elements count once per rank."""
    for chosen in choices(diverged.wide_axes):

        def counted(
            ranks: EmulatedRanks, rank: int, gradients: Gradients, kind: float, chosen: Sequence[str] = chosen
        ) -> torch.Tensor:
            return norm_of([part for peer in ranks.peers(rank, chosen) for part in _held(ranks, gradients, [peer])], kind)

        words = f"the total norm counts gradients replicated over {diverged.over(chosen)} once per rank"
        yield _by(Cause.REPLICAS_IN_NORM, words, counted)


def _put_together() -> Iterator[Counterfactual]:
    """The right norm's root or square."""
    for power, words in ((0.5, "the root of the norm"), (2.0, "the square of the norm")):

        def powered(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, kind: float, power: float = power) -> torch.Tensor:
            return norm_of(gradients.values(), kind) ** power

        yield _by(Cause.ANOTHER_NORM, f"gradients are clipped by {words}", powered)


def _kinds() -> Iterator[Counterfactual]:
    for kind in (1.0, 2.0, torch.inf):

        def other(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, _kind: float, kind: float = kind) -> torch.Tensor:
            return norm_of(gradients.values(), kind)

        yield _by(Cause.ANOTHER_NORM, f"gradients are clipped by their {kind:g}-norm", other)


def _on_some_ranks(diverged: DivergedTraining) -> Iterator[Counterfactual]:
    count = diverged.task.num_ranks
    for one in range(count):
        others = tuple(rank for rank in range(count) if rank != one)
        words = f"rank {one} does not clip its gradients, {'all others do' if len(others) > 1 else f'rank {others[0]} does'}"
        yield _by(Cause.NOT_CLIPPED, words, _unclipped((one,)))
        if len(others) > 1:
            yield _by(Cause.NOT_CLIPPED, f"only rank {one} clips its gradients", _unclipped(others))


def _unclipped(on: Sequence[int]) -> NormOf:
    def only(_ranks: EmulatedRanks, rank: int, gradients: Gradients, kind: float) -> torch.Tensor:
        return norm_of(gradients.values(), kind) * (0.0 if rank in on else 1.0)

    return only


def _early(*, again: bool) -> Change:
    """Clip each rank's own gradients, then reduce."""

    def change(ranks: EmulatedRanks) -> None:
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

    return change


def _left_out(diverged: DivergedTraining) -> Iterator[Counterfactual]:
    for left in diverged.updated[:MAX_LEFT_OUT]:

        def without(_ranks: EmulatedRanks, _rank: int, gradients: Gradients, kind: float, left: str = left) -> torch.Tensor:
            return norm_of([value for name, value in gradients.items() if name != left], kind)

        yield _by(Cause.PART_OF_NORM, f"the total norm leaves out `{left}`", without)
