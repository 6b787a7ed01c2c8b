"""Samples that several ranks share, or that no rank has."""

from __future__ import annotations

from collections import Counter

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.recording.causes.evidence import steps_of
from equivcheck.recording.compare.runs import RecordedRun

Samples = tuple[int, ...]


def wrong_samples(first: RecordedRun, second: RecordedRun, step: int) -> Diagnosis | None:
    """Name ranks with the same samples, or samples that are lost, if all other samples of the second run are right."""
    groups = [_ranks_by_samples(run, step) for run in (first, second)]
    one, other = (Counter(sample for samples in own for sample in samples) for own in groups)
    lost = one.keys() - other.keys()
    if not lost or not other or not other.keys() <= one.keys() or any(other[sample] != one[sample] for sample in other):
        return None
    num_lost, ranks = sum(one[sample] for sample in lost), list(groups[1].values())
    words = f"{num_lost} of {one.total()} samples of A are on no rank"
    same = max(ranks, key=len)
    # Ranks of tensor parallelism share samples as well; then all groups have the same size.
    if len(same) == 1 or (len(ranks) > 1 and all(len(own) == len(same) for own in ranks)):
        return Diagnosis(cause=Cause.ROWS_LOST, sentence=words, exact=True)
    who = "every rank computes" if len(ranks) == 1 else f"{name_ranks(same)} compute"
    return Diagnosis(cause=Cause.SAME_ROWS, sentence=f"{who} on the same samples: {words}", exact=True)


def _ranks_by_samples(run: RecordedRun, step: int) -> dict[Samples, list[int]]:
    """Ranks with the same samples, by their samples."""
    found: dict[Samples, list[int]] = {}
    for rank, record in steps_of(run, step):
        samples = tuple(sorted(sample for part in record.samples for sample in part))
        if samples:
            found.setdefault(samples, []).append(rank)
    return found
