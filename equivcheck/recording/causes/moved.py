"""Right elements in wrong places: another order, or another parameter."""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.candidate import Candidate, make_candidate
from equivcheck.recording.causes.evidence import Evidence, rms
from equivcheck.recording.compare.verdict import relative_error

SMALL, LARGE = 0.01, 0.1
"""Elements count as permuted if the tolerance is below the first, and the distance above the second share of the norm."""
FEWEST = 4
"""Least number of elements for which an order is recognized."""
NAMED = 2
"""Maximum tensors listed with another tensor's name."""


def moved_elements(evidence: Evidence, noun: str) -> Iterator[Candidate]:
    """Yield two possible mistakes: tensors have exchanged their values, or the elements in each tensor are permuted.

    `noun` says which values differ, such as ``gradients``.
    """
    yield from _exchanged(evidence, noun)
    errors = {name: _permuted_error(evidence, name) for name in evidence.wrong}
    yield Candidate(cause=Cause.PERMUTED, words=f"{{{noun}}} permuted: the right elements in wrong places", errors=errors)


def _exchanged(evidence: Evidence, noun: str) -> Iterator[Candidate]:
    sources = {name: _source(evidence, name) for name in evidence.wrong}
    found = {name: source for name, source in sources.items() if source is not None}
    if len(found) == len(sources):
        predicted = {name: evidence.expected_sums[source] for name, source in found.items()}
        pairs = join_words([f"`{name}` has that of `{source}`" for name, source in list(found.items())[:NAMED]])
        yield make_candidate(evidence, Cause.PERMUTED, f"{{{noun}}} those of other parameters: {pairs}", predicted)


def _source(evidence: Evidence, name: str) -> str | None:
    """Return the only other tensor in the first run that has the second run's values and shape."""
    tensors, place = evidence.first.tensors, (evidence.step, evidence.moment)
    found = [
        other
        for other in evidence.names
        if other != name
        and tensors[*place, other].shapes == tensors[*place, name].shapes
        and rms(evidence.found_sums[name] - evidence.expected_sums[other]) <= evidence.limits[other]
    ]
    return found[0] if len(found) == 1 else None


def _permuted_error(evidence: Evidence, name: str) -> float:
    """Differences in norm, minimum and maximum, in units of the tolerance; infinite if elements are near their positions."""
    one = evidence.first.tensors[evidence.step, evidence.moment, name]
    before, after, limit = one.sketch.value, evidence.second_tensor(name).value, evidence.limits[name]
    assert before is not None
    assert after is not None
    distance = before.distance(after)
    if limit > SMALL * before.norm or distance < LARGE * before.norm or one.numel < FEWEST:
        return float("inf")
    changes = (after.norm - before.norm, after.minimum - before.minimum, after.maximum - before.maximum)
    return relative_error(max(evidence.spreads[name], *map(abs, changes)), limit)
