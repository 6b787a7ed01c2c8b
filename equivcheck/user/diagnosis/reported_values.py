"""Wrong numbers that a user's step returns although it trains correctly: norms over wrong elements, sums, own parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import axis_combinations, peers_of
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import full_tensors_of

Norm = Callable[[int, Sequence[float]], float]
"""Function that returns a rank's gradient norm.
Its list argument has, for each rank, the sum of squares over that rank's own elements."""
Way = tuple[Cause, str, Norm]
"""A cause, words after "your step returns a gradient norm that", and the norm."""
Explanation = tuple[Cause, str]
"""A cause, and words after "your step returns a value that"."""
Values = npt.NDArray[np.float64]
"""A row for each step, a column for each rank."""


def wrong_reported_values(diverged: DivergedTraining) -> list[Diagnosis]:
    """Explain why a number that the step returns is wrong.

    Empty if another value differs too, or if no single mistake reproduces all ranks' numbers at all steps.
    """
    first = diverged.first
    is_only = all((each.phase, each.tensor) == (first.phase, first.tensor) for each in diverged.divergences)
    if first.phase not in (Phase.LOSS, Phase.REPORTED) or not is_only:
        return []
    found = np.array(_reported(diverged))
    if np.isnan(found).any():
        return []
    is_norm = _is_gradient_norm(diverged)
    value = ("a gradient norm" if is_norm else "a loss") if first.phase is Phase.LOSS else f"a value `{first.tensor}`"
    explained = _wrong_norm(diverged, found) if is_norm else None
    if explained is None:
        explained = _wrong_reduction(diverged, found) if first.phase is Phase.REPORTED else _unequal_losses(diverged, found)
    if explained is None:
        return []
    cause, words = explained
    return [Diagnosis(cause=cause, sentence=f"your step returns {value} that {words}", exact=True)]


def _wrong_norm(diverged: DivergedTraining, found: Values) -> Explanation | None:
    squares = [_squares_of_ranks(diverged, step) for step in range(diverged.num_steps)]
    for cause, words, norm in _ways(diverged):
        made = [[norm(rank, each) for rank in range(diverged.num_ranks)] for each in squares]
        if _agree(diverged, np.array(made), found):
            return cause, words
    return None


def _wrong_reduction(diverged: DivergedTraining, found: Values) -> Explanation | None:
    """Return an explanation if a number is multiplied by a count, or if each rank computes it from its own rows only."""
    right = np.array([[_expected(diverged, step)] for step in range(diverged.num_steps)])
    for count, words in diverged.counts.items():
        if _agree(diverged, right * count, found):
            return Cause.SUMMED, f"is {count} times as large as on one device, the number of {words}"
        if _agree(diverged, right / count, found):
            return Cause.AVERAGED_TWICE, f"is divided by {count}, the number of {words}"
    for axes in sorted(axis_combinations(diverged.wide_axes), key=len):
        totals = np.stack([found[:, peers].sum(axis=1) for peers in _peers(diverged, axes)], axis=1)
        for divisor, way in ((diverged.size(axes), "averaged"), (1, "summed")):
            if _agree(diverged, totals / divisor, np.broadcast_to(right, totals.shape)):
                return Cause.NOT_REDUCED, f"is not {way} over {diverged.ranks_text(axes)}: each rank returns its own part"
    return None


def _unequal_losses(diverged: DivergedTraining, found: Values) -> Explanation | None:
    """Return an explanation if ranks with the same rows return different losses whose mean is right."""
    right = np.array([[_expected(diverged, step)] for step in range(diverged.num_steps)])
    for axes in sorted(axis_combinations(diverged.same_row_axes), key=len):
        means = np.stack([found[:, peers].mean(axis=1) for peers in _peers(diverged, axes)], axis=1)
        if not diverged.data_axes and _agree(diverged, means, np.broadcast_to(right, means.shape)):
            where = diverged.ranks_text(axes)
            return Cause.NOT_REDUCED, f"differs between {where}: only the mean over them is right"
    return None


def _expected(diverged: DivergedTraining, step: int) -> float:
    """Return one device's number at a step; NaN if one device reports none."""
    value = diverged.expected_values(step, diverged.first.phase).get(diverged.first.tensor)
    return math.nan if value is None or value.size != 1 else float(value.sum())


def _peers(diverged: DivergedTraining, axes: Sequence[str]) -> list[list[int]]:
    """Return, for each rank, the ranks that differ from it only along some axes."""
    return [peers_of(diverged.coordinates, rank, axes) for rank in range(diverged.num_ranks)]


def _is_gradient_norm(diverged: DivergedTraining) -> bool:
    """Whether one device reports the norm over all gradients at each step."""
    for step in range(diverged.num_steps):
        gradients = diverged.expected_values(step, Phase.GRADIENT).values()
        norm = math.sqrt(sum(float((values**2).sum()) for values in gradients))
        if not math.isclose(_expected(diverged, step), norm, rel_tol=diverged.eps**0.5):
            return False
    return True


def _reported(diverged: DivergedTraining) -> list[list[float]]:
    """Return each rank's number at each step; NaN if the rank reports none."""
    name, is_loss = diverged.first.tensor, diverged.first.phase is Phase.LOSS
    found = []
    for step in range(diverged.num_steps):
        steps = [trace.steps[step] for trace in diverged.traces]
        if is_loss:
            found.append([math.nan if each.loss is None else each.loss for each in steps])
        else:
            reported = [{} if each.reported is None else full_tensors_of(each.reported) for each in steps]
            found.append([float(values[name].sum()) if name in values else math.nan for values in reported])
    return found


def _squares_of_ranks(diverged: DivergedTraining, step: int) -> list[float]:
    """Return, for each rank, the sum of its squared gradient elements."""
    held, right = held_elements(diverged), diverged.expected_values(step, Phase.GRADIENT)
    return [
        sum(float((values[held.by(name, rank).numpy()] ** 2).sum()) for name, values in right.items())
        for rank in range(diverged.num_ranks)
    ]


def _ways(diverged: DivergedTraining) -> Iterator[Way]:
    """Wrong norms, with the causes."""
    for axes in sorted(axis_combinations(diverged.wide_axes), key=len):
        peers, where = _peers(diverged, axes), diverged.ranks_text(axes)
        replicas = f"counts replicated elements once on each of {where}"
        yield Cause.REPLICAS_IN_NORM, replicas, _over(peers, lambda own: math.sqrt(sum(own)))
        yield Cause.ANOTHER_NORM, f"adds up the norms of {where}, not their squares", _over(peers, _sum_of_roots)
        yield Cause.ANOTHER_NORM, f"averages the norms of {where}", _over(peers, lambda own: _sum_of_roots(own) / len(own))
    yield Cause.LOCAL_NORM, "covers only the elements on the rank", lambda rank, own: math.sqrt(own[rank])


def _over(peers: Sequence[Sequence[int]], norm: Callable[[Sequence[float]], float]) -> Norm:
    return lambda rank, squares: norm([squares[peer] for peer in peers[rank]])


def _sum_of_roots(squares: Sequence[float]) -> float:
    return sum(math.sqrt(each) for each in squares)


def _agree(diverged: DivergedTraining, made: Values, found: Values) -> bool:
    return bool(np.allclose(made, found, rtol=diverged.eps**0.5, atol=0.0))
