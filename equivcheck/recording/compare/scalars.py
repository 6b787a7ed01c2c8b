"""Compare losses and gradient norms of two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equivcheck.diagnosis.words import name_ranks
from equivcheck.recording.compare.runs import RecordedRun, eps_of
from equivcheck.recording.compare.tensors import GRADIENTS, Tolerance
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Comparison of the loss in both runs, in one step."""

    difference: TensorDifference
    """Difference between the losses, each averaged over ranks. Its distance is 0 if `factor` explains the difference."""
    factor: str = ""
    """Clause about the factor between both losses. Empty unless the factor is a whole number or an inverse of one."""


def precision(run: RecordedRun, step: int) -> float:
    """Largest machine epsilon among the dtypes of a step's gradients."""
    names = {entry.dtype for record in run.records[step] for entry in record.entries if entry.moment in GRADIENTS}
    return max(map(eps_of, names), default=0.0)


def compare_losses(first: RecordedRun, second: RecordedRun, step: int, tolerance: Tolerance) -> Losses | None:
    """Compare a step's losses: the scalars on which both runs call `backward`. Returns None if a run calls it on no scalar."""
    one, other = _means(first, step), _means(second, step)
    if not one or not other:
        return None
    moved = [values[0] for run in tolerance.moved if (values := _means(run, step))]
    eps = max(precision(first, step), precision(second, step))
    allowed = tolerance.of_number(eps, one[0], moved)
    distance = min(abs(mine - yours) for mine in one for yours in other)
    factor = "" if distance <= allowed else _factor(one[0], other[0], allowed)
    return Losses(
        difference=TensorDifference(
            step=step,
            moment=Moment.LOSS,
            tensor="loss",
            difference=Difference.VALUE,
            distance=0.0 if factor else distance,
            norm=abs(one[0]),
            allowed=allowed,
            eps=eps,
            detail=f"{other[0]:.6g} in B, {one[0]:.6g} in A",
        ),
        factor=factor,
    )


def _means(run: RecordedRun, step: int) -> tuple[float, float] | None:
    """Return the mean over ranks with a loss, unweighted and weighted by numbers of samples.

    Both means are the same if all numbers are equal.
    """
    found = [(math.fsum(record.losses), sum(map(len, record.samples))) for record in run.records[step] if record.losses]
    if not found:
        return None
    mean, total = math.fsum(loss for loss, _ in found) / len(found), sum(number for _, number in found)
    return mean, math.fsum(loss * number for loss, number in found) / total if total else mean


def _factor(one: float, other: float, allowed: float) -> str:
    """Return a clause about an integer factor between two losses, as from a gradient scaler, or from sums in place of means."""
    if not one or not other or not math.isfinite(one) or not math.isfinite(other):
        return ""
    ratio = other / one
    factor = round(max(ratio, 1 / ratio))
    if factor < 2 or abs(ratio / factor - 1 if ratio > 1 else ratio * factor - 1) > allowed / abs(one):
        return ""
    return f"the loss of {'B' if ratio > 1 else 'A'} is {factor:,} times that of {'A' if ratio > 1 else 'B'}"


def compare_norms(first: RecordedRun, second: RecordedRun, step: int, tolerance: Tolerance) -> Iterator[TensorDifference]:
    """Compare a step's gradient norms, as clipping functions return them. Both runs must call these functions equally often."""
    one, other = _norms(first, step), _norms(second, step)
    if not one or len(one) != len(other):
        return
    eps = max(precision(first, step), precision(second, step))
    moved = [norms for run in tolerance.moved if len(norms := _norms(run, step)) == len(one)]
    for number, (mine, yours) in enumerate(zip(one, other, strict=True)):
        allowed = tolerance.of_number(eps, mine[0], [norms[number][0] for norms in moved])
        distance = max(abs(value - mine[0]) for value in (*mine, *yours))
        yield TensorDifference(
            step=step,
            moment=Moment.NORM,
            tensor="norm" if len(one) == 1 else f"norm {number}",
            difference=Difference.VALUE,
            distance=distance,
            norm=abs(mine[0]),
            allowed=allowed,
            eps=eps,
            detail=f"{_by_rank(yours)} in B, {_by_rank(mine)} in A",
        )


def _norms(run: RecordedRun, step: int) -> list[tuple[float, ...]]:
    """Return each call's norms over ranks; empty if ranks differ in their number of calls."""
    clips = [record.clips for record in run.records[step]]
    if len({len(own) for own in clips}) > 1:
        return []
    return [tuple(clip.norm for clip in call) for call in zip(*clips, strict=True)]


def _by_rank(values: Sequence[float]) -> str:
    """Format one number, or several numbers with their ranks."""
    texts = [f"{value:.6g}" for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    shown = [f"{text} on {name_ranks(own)}" for text, own in list(ranks.items())[:4]]
    return ", ".join([*shown, *(["..."] if len(ranks) > len(shown) else [])])
