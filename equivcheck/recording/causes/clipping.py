"""Mistakes in clipping: another norm, another limit, or none. Gradients before clipping are right in these cases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.candidate import Candidate, make_candidate
from equivcheck.recording.causes.evidence import Evidence, Sums, entries_of, linear_combination, rms, spread, steps_of
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.verdict import relative_error
from equivcheck.recording.sketch import Sketch
from equivcheck.recording.trace import Clip, Moment

MAX_LEFT_OUT = 24
"""Largest number of tensors to try as missing from the norm."""
FEWEST_LIMITED = 2
"""Least number of tensors with an element at the limit. One largest element is no limit."""
SMALL = 0.01
"""A tolerance below this share of the limit: minimum and maximum show the limit."""
TINY = 1e-6
"""Number that torch adds to a norm before dividing by it."""


def wrong_clipping(evidence: Evidence) -> Iterator[Candidate]:
    """Yield possible mistakes in gradient clipping.

    Yields nothing if the first run does not clip, or if its gradients before clipping are not known.
    """
    step, squares = evidence.step, _squares(evidence.first, evidence.step)
    if evidence.moment is not Moment.GRADIENT or not squares:
        return
    unclipped = evidence.sums(evidence.first, step, Moment.UNCLIPPED)
    without = make_candidate(evidence, Cause.NOT_CLIPPED, "gradients are not clipped", unclipped)
    yield without
    limits = [next(_clips(run, step), None) for run in (evidence.first, evidence.second)]
    if limits[0] is None or (limits[1] is None and without.worst(evidence.wrong) <= 1.0):
        return  # a smaller norm, such as that of each tensor, may be below the limit as well
    limit, total = limits[0].max_norm, math.sqrt(math.fsum(squares.values()))

    def with_norm(cause: Cause, words: str, norm: float, *, at_most: float = limit) -> Candidate:
        return make_candidate(evidence, cause, words, linear_combination((_coefficient(norm, at_most), unclipped)))

    if limits[0].norm_type != 2.0:
        yield with_norm(Cause.ANOTHER_NORM, "gradients are clipped by their 2-norm", total)
        return
    if limits[1] is not None and limits[1].max_norm != limit and _coefficient(total, limits[1].max_norm) < 1.0:
        words = f"gradients are clipped to a norm of {limits[1].max_norm:g}, not {limit:g}"
        yield with_norm(Cause.HYPERPARAMETER, words, total, at_most=limits[1].max_norm)
    own = _local_norms(evidence.second, step)
    if len(own) > 1:
        yield _locally(evidence, own, limit)
        for words, norm in _combinations(list(own.values())):
            yield with_norm(Cause.ANOTHER_NORM, f"the local norms on the {len(own)} ranks are {words}", norm)
        words = f"the total norm counts gradients replicated over the {len(own)} ranks once per rank"
        yield with_norm(Cause.REPLICAS_IN_NORM, words, math.hypot(*own.values()))
    for power, words in ((0.5, "the root of the norm"), (2.0, "the square of the norm")):
        yield with_norm(Cause.ANOTHER_NORM, f"gradients are clipped by {words}", total**power)
    words = "gradients are clipped by the sum of the tensors' norms, not by the norm over all elements"
    yield with_norm(Cause.ANOTHER_NORM, words, math.fsum(math.sqrt(each) for each in squares.values()))
    yield with_norm(Cause.ANOTHER_NORM, "gradients are clipped by their inf-norm", _largest(evidence))
    each_by_its_own = {name: _coefficient(math.sqrt(squares[name]), limit) * sums for name, sums in unclipped.items()}
    yield make_candidate(evidence, Cause.PART_OF_NORM, "each tensor is clipped by its own norm", each_by_its_own)
    yield from _counted_twice(evidence, squares, limit)
    for name in list(squares)[:MAX_LEFT_OUT]:
        norm = math.sqrt(math.fsum(own for other, own in squares.items() if other != name))
        yield with_norm(Cause.PART_OF_NORM, f"the total norm leaves out `{name}`", norm)


def _counted_twice(evidence: Evidence, squares: Mapping[str, float], limit: float) -> Iterator[Candidate]:
    """Yield a shared weight, passed to clipping by both names. torch then also scales it twice."""
    unclipped = evidence.sums(evidence.first, evidence.step, Moment.UNCLIPPED)
    for name in list(squares)[:MAX_LEFT_OUT]:
        once = _coefficient(math.sqrt(math.fsum([*squares.values(), squares[name]])), limit)
        scaled = linear_combination((once, unclipped))
        twice = scaled | {name: once * scaled[name]}
        words = f"the total norm counts `{name}` twice"
        yield make_candidate(evidence, Cause.REPLICAS_IN_NORM, words, scaled)
        yield make_candidate(evidence, Cause.REPLICAS_IN_NORM, f"{words}, and its gradient is scaled twice", twice)


def limited_elements(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the mistake that each gradient element is limited, as by `clip_grad_value_`.

    It is yielded only if several tensors in the second run have the same largest absolute value.
    """
    step, run = evidence.step, evidence.first
    before = run.tensors_at(step, Moment.UNCLIPPED) or run.tensors_at(step, evidence.moment)
    pairs = {name: (before[name].sketch.value, evidence.second_tensor(name).value) for name in evidence.names if name in before}
    found = {name: (one, other) for name, (one, other) in pairs.items() if one is not None and other is not None}
    limit = max((max(other.maximum, -other.minimum) for _, other in found.values()), default=0.0)
    errors = {name: _limited_error(evidence, name, one, other, limit) for name, (one, other) in found.items()}
    if sum(limit in (-other.minimum, other.maximum) for _, other in found.values()) >= FEWEST_LIMITED and limit:
        words = f"each element of the gradients is limited to {limit:.4g}, as by `clip_grad_value_`"
        yield Candidate(cause=Cause.ANOTHER_NORM, words=words, errors=errors, is_exact=False)


def _limited_error(evidence: Evidence, name: str, one: Sketch, other: Sketch, limit: float) -> float:
    """Error of a tensor's minimum and maximum, or of all sums if no element exceeds the limit."""
    if evidence.limits[name] > SMALL * limit:
        return math.inf
    least, most = (min(max(value, -limit), limit) for value in (one.minimum, one.maximum))
    if (least, most) == (one.minimum, one.maximum):
        return relative_error(max(one.distance(other), evidence.spreads[name]), evidence.limits[name])
    apart = max(abs(other.minimum - least), abs(other.maximum - most), other.norm - one.norm)
    return relative_error(max(apart, evidence.spreads[name]), evidence.limits[name])


def _coefficient(norm: float, limit: float) -> float:
    return min(1.0, limit / (norm + TINY))


def _clips(run: RecordedRun, number: int) -> Iterator[Clip]:
    return (clip for _, step in steps_of(run, number) for clip in step.clips)


def _squares(run: RecordedRun, number: int) -> Mapping[str, float]:
    """Return each complete gradient's squared norm before clipping."""
    return {
        name: tensor.sketch.value.squares
        for name, tensor in run.tensors_at(number, Moment.UNCLIPPED).items()
        if tensor.sketch.value is not None
    }


def _largest(evidence: Evidence) -> float:
    found = [entry.sketch for _, entry in entries_of(evidence.first, evidence.step, Moment.UNCLIPPED)]
    return max(max(abs(sketch.minimum), abs(sketch.maximum)) for sketch in found)


def _local_norms(run: RecordedRun, number: int) -> dict[int, float]:
    """Return each rank's norm over its own parts before clipping."""
    squares: dict[int, list[float]] = {}
    for rank, entry in entries_of(run, number, Moment.UNCLIPPED):
        squares.setdefault(rank, []).append(entry.sketch.squares)
    return {rank: math.sqrt(math.fsum(own)) for rank, own in squares.items()}


def _combinations(norms: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield wrong ways to combine local norms, the same ways as in `equivcheck.diagnosis.mistakes.clipping`."""
    yield "summed", math.fsum(norms)
    yield "combined by their maximum", max(norms)
    yield "averaged", math.fsum(norms) / len(norms)
    yield "summed as powers, without the root of the sum", math.fsum(norm**2 for norm in norms)
    yield "combined as the root of their maximum", math.sqrt(max(norms))
    yield "combined as the root of their sum", math.sqrt(math.fsum(norms))


def _locally(evidence: Evidence, norms: Mapping[int, float], limit: float) -> Candidate:
    """Return the candidate in which each rank scales its own parts by a factor of its own."""
    before = {
        (rank, entry.piece): entry.sketch.sums for rank, entry in entries_of(evidence.second, evidence.step, Moment.UNCLIPPED)
    }
    errors: dict[str, float] = {}
    for rank, entry in entries_of(evidence.second, evidence.step, Moment.GRADIENT):
        name = entry.piece.name
        if name in evidence.limits and (rank, entry.piece) in before:
            predicted: Sums = before[rank, entry.piece] * _coefficient(norms[rank], limit)
            error = relative_error(rms(entry.sketch.sums - predicted), evidence.limits[name])
            errors[name] = max(errors.get(name, 0.0), error)
    words = "each rank clips by its local norm, over the elements that it holds"
    return Candidate(cause=Cause.LOCAL_NORM, words=words, errors=errors)


def clipped_early(evidence: Evidence) -> Candidate | None:
    """Return the mistake that ranks clip gradients before they reduce them.

    Returns None if the second run does not clip, or if its clipped gradients differ between ranks.
    """
    second, step = evidence.second, evidence.step
    clipped = second.tensors_at(step, Moment.GRADIENT)
    after = {name: clipped[name].sketch for name in evidence.names if name in clipped}
    limits = {name: evidence.tolerance((step, Moment.GRADIENT, name)) for name in after}
    clip = next(_clips(second, step), None)
    if clip is None or any(spread(after[name]) > limit for name, limit in limits.items()):
        return None
    norms = _local_norms(second, step)
    own: dict[str, list[Sums]] = {}
    for rank, entry in entries_of(second, step, Moment.UNCLIPPED):
        own.setdefault(entry.piece.name, []).append(entry.sketch.sums * _coefficient(norms[rank], clip.max_norm))
    errors = {
        name: relative_error(rms(tensor.value.sums - np.mean(own[name], axis=0)), limits[name])
        for name, tensor in after.items()
        if tensor.value is not None
    }
    words = "each rank clips the gradients of its own rows before they are reduced"
    return Candidate(cause=Cause.CLIPPED_BEFORE_REDUCTION, words=words, errors=errors)
