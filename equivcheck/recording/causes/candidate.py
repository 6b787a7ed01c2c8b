"""Mistakes as linear relations between two runs' sums, and the choice among the relations in question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equivcheck.diagnosis.words import tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.evidence import Evidence, Sums, Tensors, rms
from equivcheck.recording.compare.verdict import relative_error

CLEARER = 8.0
"""Factor by which a relation must fit better than any other relation, and better than no mistake at all."""
FINEST = 1 / 16
"""Errors below this share of the tolerance count as equal: rounding decides which is smaller."""
FEWEST = 8
"""Sums required for each coefficient, if several are fitted. A fit to fewer sums may agree by chance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A possible mistake in the second run, and how far its predicted values are from the recorded values."""

    cause: Cause
    """The mistake, as a code for programs."""
    words: str
    """The mistake in a sentence. ``{gradients}``, ``{parameters}`` and ``{updates}`` are replaced by a subject and a verb."""
    errors: Mapping[str, float]
    """For each tensor, the distance between predicted and recorded values, divided by the tolerance."""
    size: float = 1.0
    """Factor by which the tolerance was multiplied. A prediction that scales a tensor also scales the tensor's rounding errors.
    """
    fitted: int = 0
    """How many coefficients were fitted to the second run's values."""
    is_exact: bool = True
    """Whether all signed sums were predicted. If not, only minimum, maximum and norm were."""

    def worst(self, names: Iterable[str]) -> float:
        """The largest error among the tensors `names`; infinity if this candidate predicts no values for one of them."""
        return max((self.errors.get(name, np.inf) for name in names), default=np.inf)


def make_candidate(  # noqa: PLR0913 - a cause, its words, and its relation
    evidence: Evidence,
    cause: Cause,
    words: str,
    predicted: Tensors,
    *,
    size: float = 1.0,
    found: Tensors | None = None,
    fitted: int = 0,
) -> Candidate:
    """Compare signed sums predicted from a mistake with the second run's, and return a candidate with each tensor's error.

    If a prediction is a linear combination, `size` is the sum over its coefficients' absolute values. `found` replaces the second
    run's signed sums, for example by the replicas' means. Without `found`, the distance between replicas counts as error.
    `cause`, `words` and `fitted` become fields of the `Candidate`.
    """
    size = max(size, 1.0)
    actual, errors = evidence.found_sums if found is None else found, {}
    for name in evidence.names:
        if name in predicted and name in actual:
            distance = rms(actual[name] - predicted[name])
            distance = max(distance, evidence.spreads[name]) if found is None else distance
            errors[name] = relative_error(distance, evidence.limits[name] * size)
    return Candidate(cause=cause, words=words, errors=errors, size=size, fitted=fitted)


def choose(evidence: Evidence, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate that explains the second run's values best.

    Returns None if no candidate explains them, or if candidates with different causes explain them about equally well. Candidates
    with fitted coefficients count only if no other candidate explains the values.
    """
    found = list(candidates)
    for own in ([each for each in found if not each.fitted], [each for each in found if each.fitted]):
        fitting = [each for each in own if _fits(evidence, each)]
        if fitting:
            best = min(fitting, key=lambda each: each.worst(evidence.wrong))
            limit = _limit(best, evidence)
            rivals = [each for each in fitting if each.worst(evidence.wrong) <= limit]
            return rivals[0] if len({each.cause for each in rivals}) == 1 else None
    return None


def _limit(candidate: Candidate, evidence: Evidence) -> float:
    return max(CLEARER * candidate.worst(evidence.wrong), FINEST)


def _fits(evidence: Evidence, candidate: Candidate) -> bool:
    if not evidence.wrong or candidate.worst(evidence.wrong) > 1.0:
        return False
    numbers = sum(_numbers(evidence, name) for name in evidence.wrong)
    if numbers <= candidate.fitted or (candidate.fitted > 1 and numbers < FEWEST * candidate.fitted):
        return False
    trivial = max(evidence.trivial_error(name) for name in evidence.wrong) / candidate.size
    return trivial > _limit(candidate, evidence)


def _numbers(evidence: Evidence, name: str) -> int:
    """Count the independent sums in a tensor's sketch."""
    tensor = evidence.first.tensors[evidence.step, evidence.moment, name]
    return min(tensor.numel, len(evidence.expected_sums[name]))


def fit(evidence: Evidence, columns: Sequence[Tensors], found: Tensors | None = None) -> Sums | None:
    """Fit a linear combination of `columns` to the second run's wrong tensors, and return its coefficients.

    Returns None if the coefficients are not unique. `found` replaces the second run's values.
    """
    found = evidence.found_sums if found is None else found
    names = [name for name in evidence.wrong if name in evidence.names and all(name in column for column in columns)]
    scales = [1.0 / evidence.limits[name] if evidence.limits[name] else 0.0 for name in names]
    if not names:
        return None
    target = np.concatenate([found[name] * scale for name, scale in zip(names, scales, strict=True)])
    matrix = np.stack(
        [np.concatenate([column[name] * scale for name, scale in zip(names, scales, strict=True)]) for column in columns],
        axis=1,
    )
    weights, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    return weights if rank == len(columns) else None


def subject(evidence: Evidence, candidate: Candidate) -> Mapping[str, str]:
    """Return the texts for the placeholders in a candidate's sentence, such as ``{gradients}``.

    They say "all gradients" if the candidate explains all tensors. Otherwise they name the tensors with wrong values.
    """
    is_all = candidate.worst(evidence.names) <= 1.0 and set(candidate.errors) >= set(evidence.names)
    what = tensors(evidence.wrong)
    found = {"parameters": "any parameter" if is_all else what}
    for key, noun in (("gradients", "gradient"), ("updates", "update"), ("values", "value")):
        one, several = f"the {noun} of {what} is", f"the {noun}s of {what} are"
        found[key] = f"all {noun}s are" if is_all else one if len(evidence.wrong) == 1 else several
    return found
