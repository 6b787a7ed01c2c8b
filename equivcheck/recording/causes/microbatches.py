"""Mistakes in sums over microbatches, or over ranks whose samples are a microbatch in the first run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.candidate import Candidate, fit, make_candidate
from equivcheck.recording.causes.evidence import Evidence, Tensors, increments, linear_combination, steps_of
from equivcheck.recording.compare.runs import RecordedRun

TRIED = 16
"""Largest number of microbatches to try."""
Samples = frozenset[int]


def wrong_microbatches(evidence: Evidence) -> Iterator[Candidate]:
    """Yield possible mistakes in the sum of gradients over microbatches.

    The first run must have recorded gradients before each backward pass, and both runs must have the same samples.
    """
    parts = increments(evidence.first, evidence.step, evidence.expected_sums)
    count, own = len(parts), _samples_of_microbatches(evidence.first, evidence.step)
    if not 1 < count <= TRIED or len(own) != count or not all(own):
        return
    by_rank = _samples_of_ranks(evidence.second, evidence.step)
    units = [f"microbatch {number} of A" for number in range(count)]
    if _samples_of_microbatches(evidence.second, evidence.step) == own:
        units = [f"microbatch {number}" for number in range(count)]
        yield from _lost_or_repeated(evidence, parts)
        yield from _accumulated_again(evidence, parts)
    elif sorted(map(sorted, by_rank)) == sorted(map(sorted, own)):
        ranks = [by_rank.index(samples) for samples in own]
        units = [f"rank {rank}" for rank in ranks]
        yield from _from_one_rank(evidence, parts, ranks)
    elif evidence.is_one_rank and by_rank[0] in own:
        words = "{gradients} left unreduced: the rank keeps its own part"
        only = [float(count) * (samples == by_rank[0]) for samples in own]
        yield _weighted(evidence, Cause.NOT_REDUCED, words, only, parts)
        return
    elif frozenset().union(*by_rank) != frozenset().union(*own):
        return
    weights = fit(evidence, parts)
    if weights is not None:
        named = join_words([f"{unit} counts {weight:.4g} times" for unit, weight in zip(units, weights, strict=True)])
        words = f"{{gradients}} sums with other weights than in A: {named}"
        yield _weighted(evidence, Cause.SCALED, words, list(map(float, weights)), parts, fitted=count)


def _weighted(  # noqa: PLR0913, PLR0917 - a cause, its words, and its relation
    evidence: Evidence, cause: Cause, words: str, weights: Sequence[float], parts: Sequence[Tensors], fitted: int = 0
) -> Candidate:
    predicted = linear_combination(*zip(weights, parts, strict=True))
    return make_candidate(evidence, cause, words, predicted, size=sum(map(abs, weights)), fitted=fitted)


def _samples_of_microbatches(run: RecordedRun, step: int) -> list[Samples]:
    """Return each microbatch's samples over all ranks."""
    found: dict[int, Samples] = {}
    for _, record in steps_of(run, step):
        for number, samples in enumerate(record.samples):
            found[number] = found.get(number, Samples()) | frozenset(samples)
    return [found[number] for number in sorted(found)]


def _samples_of_ranks(run: RecordedRun, step: int) -> list[Samples]:
    return [frozenset(sample for part in record.samples for sample in part) for _, record in steps_of(run, step)]


def _lost_or_repeated(evidence: Evidence, parts: Sequence[Tensors]) -> Iterator[Candidate]:
    count = len(parts)
    for number in range(count):
        where = {0: " (the first)", count - 1: " (the last)"}.get(number, "")
        only = [float(at == number) for at in range(count)]
        for factor, share in ((float(count), ""), (1.0, ", weighted by its share")):
            words = f"{{gradients}} from microbatch {number}{where} only{share}"
            yield _weighted(evidence, Cause.MICROBATCH_LOST, words, [factor * one for one in only], parts)
        words = f"{{gradients}} accumulated with microbatch {number}{where} added twice"
        yield _weighted(evidence, Cause.MICROBATCH_REPEATED, words, [1.0 + one for one in only], parts)
        for factor, averaged in ((1.0, ""), (count / (count - 1), " and averaged over the others")) if count > 2 else ():
            words = f"{{gradients}} missing microbatch {number}{where}{averaged}"
            yield _weighted(evidence, Cause.MICROBATCH_LOST, words, [factor * (1.0 - one) for one in only], parts)


def _accumulated_again(evidence: Evidence, parts: Sequence[Tensors]) -> Iterator[Candidate]:
    """Yield accumulated gradients that are divided or summed again at each microbatch."""
    count, ranks = len(parts), len(evidence.second.ranks)
    cause = Cause.RESCALED_EACH_MICROBATCH
    for full, more in ((float(count), ""), (1.0, " again")):
        for late, when in ((0, "after"), (1, "before")):
            words = f"{{gradients}} divided by the number of microbatches{more} {when} each microbatch"
            weights = [full * count ** (number + late - float(count)) for number in range(count)]
            yield _weighted(evidence, cause, words, weights, parts)
    if ranks > 1:
        words = f"{{gradients}} summed over the {ranks} ranks again after each microbatch"
        yield _weighted(evidence, cause, words, [ranks ** (count - 1.0 - number) for number in range(count)], parts)


def _from_one_rank(evidence: Evidence, parts: Sequence[Tensors], ranks: Sequence[int]) -> Iterator[Candidate]:
    """Yield one rank's gradients on every rank. `ranks` are the ranks that have the microbatches' samples."""
    for number, rank in enumerate(ranks):
        words = f"{{gradients}} copied from rank {rank} to every rank, not reduced"
        weights = [float(len(parts)) * (at == number) for at in range(len(parts))]
        yield _weighted(evidence, Cause.NOT_REDUCED, words, weights, parts)
