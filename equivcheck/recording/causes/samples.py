"""Samples that several ranks share, or that no rank has."""

from __future__ import annotations

from collections import Counter

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.recording.causes.evidence import num_microbatches, steps_of
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.samples import is_data_parallel

Samples = tuple[int, ...]


def wrong_samples(first: RecordedRun, second: RecordedRun, step: int) -> Diagnosis | None:
    """Name ranks or microbatches that train on the same samples, or samples that no rank has.

    None if the second run has additional samples, or if it repeats some samples more often than others.
    """
    groups = [_ranks_by_samples(run, step) for run in (first, second)]
    one, other = (Counter(sample for samples in own for sample in samples) for own in groups)
    lost = one.keys() - other.keys()
    times = {other[sample] / one[sample] if one[sample] else 0.0 for sample in other}
    if not lost or len(times) != 1 or 0.0 in times:
        return None
    if (found := _over_several_steps(first, second, step, one)) is not None:
        return found
    elsewhere = {sample for at in second.steps if at != step for samples in _ranks_by_samples(second, at) for sample in samples}
    if lost & elsewhere:
        return None
    num_lost, ranks = sum(one[sample] for sample in lost), list(groups[1].values())
    words = f"{num_lost} of {one.total()} samples of A are on no rank"
    if times != {1.0}:
        is_same = _has_same_microbatches(second, step)
        words = f"every microbatch has the same samples: {words}"
        return Diagnosis(cause=Cause.ROWS_LOST, sentence=words, exact=True) if is_same else None
    same = max(ranks, key=len)
    # Ranks of tensor parallelism share samples as well; then all groups have the same size.
    if len(same) == 1 or (len(ranks) > 1 and all(len(own) == len(same) for own in ranks)):
        return Diagnosis(cause=Cause.ROWS_LOST, sentence=words, exact=True)
    who = "every rank computes" if len(ranks) == 1 else f"{name_ranks(same)} compute"
    return Diagnosis(cause=Cause.SAME_ROWS, sentence=f"{who} on the same samples: {words}", exact=True)


def _over_several_steps(first: RecordedRun, second: RecordedRun, step: int, wanted: Counter[int]) -> Diagnosis | None:
    """Name the mistake if several steps of the second run have the samples of one step of the first."""
    if (number := _steps_for_one(second, step, wanted)) < 2:
        return None
    steps = f"B's steps {step} to {step + number - 1} have the samples of A's step {step}"
    if len(_ranks_by_samples(second, step)) == 1 and is_data_parallel(second, range(len(second.ranks)), step):
        return Diagnosis(cause=Cause.SAME_ROWS, sentence=f"every rank computes on the same samples: {steps}", exact=True)
    if num_microbatches(first, step) == 1:
        return None
    words = f"the optimizer steps at each microbatch: {steps}"
    return Diagnosis(cause=Cause.STEPPED_EACH_MICROBATCH, sentence=words, exact=True)


def _steps_for_one(second: RecordedRun, step: int, wanted: Counter[int]) -> int:
    """Return how many steps in the second run together have the samples from one step in the first; 0 if none do."""
    found: Counter[int] = Counter()
    for number, at in enumerate(each for each in second.steps if each >= step):
        found += Counter(sample for samples in _ranks_by_samples(second, at) for sample in samples)
        if found == wanted:
            return number + 1
    return 0


def _has_same_microbatches(run: RecordedRun, step: int) -> bool:
    parts = [[sorted(part) for part in record.samples] for _, record in steps_of(run, step)]
    return all(len(own) > 1 and all(part == own[0] for part in own) for own in parts)


def _ranks_by_samples(run: RecordedRun, step: int) -> dict[Samples, list[int]]:
    """Return the ranks that have the same samples, by samples."""
    found: dict[Samples, list[int]] = {}
    for rank, record in steps_of(run, step):
        samples = tuple(sorted(sample for part in record.samples for sample in part))
        if samples:
            found.setdefault(samples, []).append(rank)
    return found
