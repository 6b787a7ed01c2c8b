"""Compares both runs' samples (rows of the batch) in a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from equivcheck.diagnosis.words import name_ranks
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.trace import Moment
from equivcheck.scenario.scenario import count

Samples = Counter[int]
"""For the hash of each sample: how many times the sample is on a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """Comparison of both runs' samples in one step."""

    num_samples: tuple[int, int]
    """How many distinct samples run A and run B have."""
    difference: str = ""
    """Clause about the samples that only one run has. Empty if both runs have the same samples."""
    has_other_form: bool = False
    """Whether one run's ranks may hold parts of the other run's samples, as with context parallelism."""
    is_plausible: bool = True
    """Whether the samples may be equal although their hashes differ, because one run has as many as the other or a multiple.
    Equal gradients then show that they are equal.
    """


def samples_on(run: RecordedRun, step: int, ranks: Sequence[int]) -> Samples:
    """Return the sample hashes on `ranks`, each with how often it occurs."""
    records = run.records[step]
    return Counter(sample for rank in ranks for microbatch in records[rank].samples for sample in microbatch)


def input_ranks(run: RecordedRun, step: int, other: RecordedRun) -> tuple[int, ...]:
    """Return the ranks of `run` whose recorded inputs are samples. Later pipeline stages get activations instead.

    A stage's inputs are samples if `other`, the run to compare with, also has some of them. A stage here is a group of ranks with
    common parameters. Data-parallel ranks with FSDP1's flat shards may form several stages.
    """
    known = samples_on(other, step, range(len(other.ranks)))
    found = {stage: samples_on(run, step, stage) for stage in run.stages}
    stages = [stage for stage in run.stages if found[stage].keys() & known.keys()] or [
        max(run.stages, key=lambda stage: bool(found[stage]))
    ]
    ranks = tuple(sorted(chain.from_iterable(stages)))
    return tuple(rank for rank in ranks if run.records[step][rank].samples) or ranks


def compare_samples(first: RecordedRun, second: RecordedRun, step: int) -> StepSamples | None:
    """Compare the samples of both runs in one step. Returns None if a run recorded no samples."""
    one = samples_on(first, step, input_ranks(first, step, second))
    other = samples_on(second, step, input_ranks(second, step, first))
    if not one or not other:
        return None
    numbers, common = (len(one), len(other)), one.keys() & other.keys()
    if not common:
        small, large = sorted((one.total(), other.total()))  # parts of two samples may be equal
        return StepSamples(
            num_samples=numbers,
            difference=f"no sample of B is in A: other data, or inputs in another form{_elsewhere(first, second, step, other)}",
            has_other_form=large > small and large % small == 0,
            is_plausible=large % small == 0,
        )
    ratios = Counter(other[sample] / one[sample] for sample in common)
    usual = ratios.most_common(1)[0][0]
    lost, added = one.keys() - other.keys(), other.keys() - one.keys()
    if not lost and not added and len(ratios) == 1:
        return StepSamples(num_samples=numbers)
    num_lost, num_added = sum(one[sample] for sample in lost), sum(other[sample] for sample in added)
    clauses = [_same_ranks(first, second, step, numbers)]
    clauses += [f"{len(added)} of {len(other)} samples of B are not in A{_elsewhere(first, second, step, other)}"] * bool(added)
    clauses += [f"{len(lost)} of {len(one)} samples of A are not in B"] * bool(lost)
    if not lost and not added:
        repeated = sum(other[sample] / one[sample] != usual for sample in common)
        clauses.append(f"{repeated} of {count(len(other), 'sample')} counts more often, or less often, in B than in A")
    return StepSamples(
        num_samples=numbers,
        difference="; ".join(filter(None, clauses)),
        is_plausible=len(ratios) == 1 and math.isclose(num_added, usual * num_lost),
    )


def _elsewhere(first: RecordedRun, second: RecordedRun, step: int, other: Samples) -> str:
    """Return a clause about run A's steps that have run B's samples; empty if there are none."""
    steps = {number: samples_on(first, number, input_ranks(first, number, second)).keys() for number in first.steps}
    for number, own in steps.items():
        if number != step and own == other.keys():
            return f"; B's step {step} has the samples of A's step {number}"
    return "; A has them in other steps" if other.keys() <= set().union(*steps.values()) else ""


def _same_ranks(first: RecordedRun, second: RecordedRun, step: int, numbers: tuple[int, int]) -> str:
    """Return a clause about data-parallel ranks with the same samples, in the run with fewer samples; else empty."""
    if numbers[0] == numbers[1]:
        return ""
    run, other = (first, second) if numbers[0] < numbers[1] else (second, first)
    ranks = input_ranks(run, step, other)
    if not is_data_parallel(run, ranks, step):
        return ""
    groups: dict[frozenset[tuple[int, int]], list[int]] = {}
    for rank in ranks:
        groups.setdefault(frozenset(samples_on(run, step, [rank]).items()), []).append(rank)
    same = next((found for samples, found in groups.items() if samples and len(found) > 1), None)
    return f"{name_ranks(same)} of {run.name} have the same samples" if same else ""


def is_data_parallel(run: RecordedRun, ranks: Sequence[int], step: int) -> bool:
    """Whether `ranks` hold only full parameters, or only shards along dim 0, as under data parallelism.

    Tensor parallelism also splits along later dims, or has both replicas and shards. Tensor-parallel ranks train on the same
    samples.
    """
    if len(ranks) == 1:
        return False
    kinds = set()
    for tensor in run.tensors_at(step, Moment.UPDATE).values():
        if set(tensor.ranks) & set(ranks):
            pieces = [entry.piece for entry in tensor.entries]
            is_full = len(pieces) > 1 and all(piece.numel == tensor.numel for piece in pieces)
            has_columns = any(piece.size[1:] != piece.shape[1:] for piece in pieces if piece.start)
            kinds.add("replicas" if is_full else "columns" if has_columns else "rows")
    return kinds in ({"replicas"}, {"rows"})


def all_ranks_have_the_same(run: RecordedRun, step: int) -> bool:
    """Whether all data-parallel ranks train on the same samples and have the same loss.

    If so, their gradients are equal even without a reduction.
    """
    records = run.records[step]
    samples = {tuple(sorted(sample for microbatch in record.samples for sample in microbatch)) for record in records}
    if len(run.stages) > 1 or len(samples) > 1 or not any(samples):
        return False
    losses = [sum(record.losses) for record in records]
    return all(math.isclose(loss, losses[0], rel_tol=1e-4) for loss in losses) and is_data_parallel(run, run.stages[0], step)
