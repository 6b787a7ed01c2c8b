"""Samples that several ranks share, or that no rank has."""

from __future__ import annotations

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.recording.causes.evidence import steps_of
from equivcheck.recording.compare.runs import RecordedRun


def wrong_samples(first: RecordedRun, second: RecordedRun, step: int) -> Diagnosis | None:
    """Name ranks with the same samples, or samples that are lost, if all samples of the second run are right."""
    by_rank = [
        {rank: frozenset(sample for part in record.samples for sample in part) for rank, record in steps_of(run, step)}
        for run in (first, second)
    ]
    one, other = (frozenset[int]().union(*samples.values()) for samples in by_rank)
    if not other < one:
        return None
    groups: dict[frozenset[int], list[int]] = {}
    for rank, samples in by_rank[1].items():
        groups.setdefault(samples, []).append(rank)
    lost = f"{len(one - other)} of {len(one)} samples of A are on no rank"
    sizes = {len(ranks) for ranks in groups.values()}
    if len(groups) == 1 and len(by_rank[1]) > 1:
        return Diagnosis(cause=Cause.SAME_ROWS, sentence=f"every rank computes on the same samples: {lost}", exact=True)
    if len(sizes) > 1:  # ranks of tensor parallelism share samples, and each group has the same size
        same = next(ranks for ranks in groups.values() if len(ranks) == max(sizes))
        words = f"{name_ranks(same)} compute on the same samples: {lost}"
        return Diagnosis(cause=Cause.SAME_ROWS, sentence=words, exact=True)
    return Diagnosis(cause=Cause.ROWS_LOST, sentence=lost, exact=True)
