"""Mistakes in accumulation: a microbatch is lost, repeated, or has another weight."""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.candidate import Candidate, fit, make_candidate
from equivcheck.recording.causes.evidence import Evidence, increments, linear_combination, steps_of
from equivcheck.recording.compare.runs import RecordedRun

TRIED = 16
"""Largest number of microbatches to try."""


def wrong_microbatches(evidence: Evidence) -> Iterator[Candidate]:
    """Yield mistakes in accumulation, if the first run has gradients after each microbatch."""
    parts = increments(evidence.first, evidence.step, evidence.expected_sums)
    count = len(parts)
    if not 1 < count <= TRIED or _samples(evidence.first, evidence.step) != _samples(evidence.second, evidence.step):
        return
    for number, part in enumerate(parts):
        where = {0: ", the first,", count - 1: ", the last,"}.get(number, "")
        for factor, share in ((float(count), ""), (1.0, ", weighted by its share")):
            words = f"{{gradients}} from microbatch {number}{where} only{share}"
            yield make_candidate(evidence, Cause.MICROBATCH_LOST, words, linear_combination((factor, part)), size=factor)
        words = f"{{gradients}} accumulated with microbatch {number}{where} added twice"
        predicted = linear_combination((1.0, evidence.expected_sums), (1.0, part))
        yield make_candidate(evidence, Cause.MICROBATCH_REPEATED, words, predicted, size=2.0)
        if count > 2:
            for factor, averaged in ((1.0, ""), (count / (count - 1), " and averaged over the others")):
                words = f"{{gradients}} missing microbatch {number}{where.rstrip(',')}{averaged}"
                predicted = linear_combination((factor, evidence.expected_sums), (-factor, part))
                yield make_candidate(evidence, Cause.MICROBATCH_LOST, words, predicted, size=2 * factor)
    weights = fit(evidence, parts)
    if weights is not None:
        named = join_words([f"microbatch {number} counts {weight:.4g} times" for number, weight in enumerate(weights)])
        predicted = linear_combination(*zip(map(float, weights), parts, strict=True))
        words = f"{{gradients}} sums with other weights than in A: {named}"
        size = float(abs(weights).sum())
        yield make_candidate(evidence, Cause.SCALED, words, predicted, size=size, fitted=count)


def _samples(run: RecordedRun, step: int) -> list[frozenset[int]]:
    """Each microbatch's samples over all ranks."""
    found: dict[int, frozenset[int]] = {}
    for _, record in steps_of(run, step):
        for number, samples in enumerate(record.samples):
            found[number] = found.get(number, frozenset()) | frozenset(samples)
    return [found[number] for number in sorted(found)]
