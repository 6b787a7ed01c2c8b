"""Gradient norms returned by a user's step and computed over wrong elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import axis_combinations
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import full_tensors_of

Norm = Callable[[int, Sequence[float]], float]
"""Returns a rank's norm from the sums of squares over each rank's own elements."""
Way = tuple[Cause, str, Norm]
"""A cause, words after "your step returns", and the norm."""


def wrong_reported_norms(diverged: DivergedTraining) -> list[Diagnosis]:
    """Return why a reported gradient norm is wrong, if only it differs, and a wrong sum gives all ranks' values."""
    first = diverged.first
    is_only = all((each.phase, each.tensor) == (first.phase, first.tensor) for each in diverged.divergences)
    if first.phase not in (Phase.LOSS, Phase.REPORTED) or not is_only or not _is_gradient_norm(diverged):
        return []
    found = _reported(diverged)
    squares = [_squares_of_ranks(diverged, step) for step in range(diverged.num_steps)]
    value = "a gradient norm" if first.phase is Phase.LOSS else f"`{first.tensor}`, a gradient norm,"
    for cause, words, norm in _ways(diverged):
        made = [[norm(rank, each) for rank in range(diverged.num_ranks)] for each in squares]
        if _agree(diverged, made, found):
            return [Diagnosis(cause=cause, sentence=f"your step returns {value} {words}", exact=True)]
    return []


def _is_gradient_norm(diverged: DivergedTraining) -> bool:
    """Whether one device reports the norm over all gradients at each step."""
    for step in range(diverged.num_steps):
        gradients = diverged.expected_values(step, Phase.GRADIENT).values()
        norm = math.sqrt(sum(float((values**2).sum()) for values in gradients))
        value = diverged.expected_values(step, diverged.first.phase).get(diverged.first.tensor)
        if value is None or not _is_close(diverged, float(value.sum()), norm):
            return False
    return True


def _is_close(diverged: DivergedTraining, one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=diverged.eps**0.5)


def _reported(diverged: DivergedTraining) -> list[list[float | None]]:
    """Each rank's value at each step."""
    name, is_loss = diverged.first.tensor, diverged.first.phase is Phase.LOSS
    found = []
    for step in range(diverged.num_steps):
        steps = [trace.steps[step] for trace in diverged.traces]
        if is_loss:
            found.append([each.loss for each in steps])
        else:
            reported = [{} if each.reported is None else full_tensors_of(each.reported) for each in steps]
            found.append([float(values[name].sum()) if name in values else None for values in reported])
    return found


def _squares_of_ranks(diverged: DivergedTraining, step: int) -> list[float]:
    """For each rank, the sum of squares over its own gradient elements."""
    held, right = held_elements(diverged), diverged.expected_values(step, Phase.GRADIENT)
    return [
        sum(float((values[held.by(name, rank).numpy()] ** 2).sum()) for name, values in right.items())
        for rank in range(diverged.num_ranks)
    ]


def _ways(diverged: DivergedTraining) -> Iterator[Way]:
    """Wrong norms, with the causes."""
    for axes in sorted(axis_combinations(diverged.wide_axes), key=len):
        peers = [
            [other.rank for other in diverged.coordinates if other.differs_only_along(own, axes)] for own in diverged.coordinates
        ]
        where = diverged.ranks_text(axes)
        replicas = f"that counts elements which several of {where} hold once for each of these ranks"
        yield Cause.REPLICAS_IN_NORM, replicas, _over(peers, lambda own: math.sqrt(sum(own)))
        yield Cause.ANOTHER_NORM, f"that adds up the norms of {where}, not their squares", _over(peers, _sum_of_roots)
        yield Cause.ANOTHER_NORM, f"that averages the norms of {where}", _over(peers, lambda own: _sum_of_roots(own) / len(own))
    yield Cause.LOCAL_NORM, "that covers only the elements that the rank holds", lambda rank, own: math.sqrt(own[rank])


def _over(peers: Sequence[Sequence[int]], norm: Callable[[Sequence[float]], float]) -> Norm:
    return lambda rank, squares: norm([squares[peer] for peer in peers[rank]])


def _sum_of_roots(squares: Sequence[float]) -> float:
    return sum(math.sqrt(each) for each in squares)


def _agree(diverged: DivergedTraining, made: list[list[float]], found: list[list[float | None]]) -> bool:
    pairs = [pair for own, others in zip(made, found, strict=True) for pair in zip(own, others, strict=True)]
    return all(other is not None and _is_close(diverged, one, other) for one, other in pairs)
