"""Says which parts were compared in two runs, and which gaps prevent the outcome EQUIVALENT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivcheck.diagnosis.words import name_ranks
from equivcheck.recording.compare.facts import Facts, Gap
from equivcheck.recording.compare.judge import CLUES
from equivcheck.recording.compare.runs import RecordedRun, steps_in_words
from equivcheck.recording.compare.samples import all_ranks_have_the_same, input_ranks
from equivcheck.recording.compare.tensors import NOISE, Tolerance
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.trace import Moment
from equivcheck.scenario.scenario import count

_NEEDED = (Moment.GRADIENT, Moment.UPDATE)
"""Points in a step without which nothing is known about the step."""
_NOUNS = {
    Moment.START: "initial parameters",
    Moment.UNCLIPPED: "gradients before clipping",
    Moment.GRADIENT: "gradients",
    Moment.UPDATE: "updated parameters",
    Moment.STATE: "optimizer state",
    Moment.BUFFER: "buffers",
}
"""Nouns for tensors at each point in a step."""

_AGAIN = "record this run again, and look for a line about the recording on stderr"
_INPUTS = "call the model with tensors that have one row for each sample, and record both runs with the same version"


def gaps_of(facts: Facts, tolerance: Tolerance) -> Iterator[Gap]:
    """Yield the gaps: values that a comparison needs and a trace does not have.

    Each gap comes with advice on how to record them.
    """
    for moment in _NEEDED:
        for run in facts.runs:
            needed = [step for step in facts.steps if moment is Moment.UPDATE or _makes_update(run, step)]
            if lacking := [step for step in needed if (step, moment) not in run.moments]:
                yield f"{run.name} has no {_NOUNS[moment]} in {steps_in_words(lacking)}", _AGAIN
    for run in facts.runs:
        yield from _moments_of_ranks(run, facts.steps)
    yield from _moments_of_one_run(facts.first, facts.second, facts.steps)
    yield from _samples(facts)
    yield from _without_update(facts)
    yield from _drowned(facts.first, facts.steps, tolerance)


def _makes_update(run: RecordedRun, step: int) -> bool:
    """Whether a step contains an update.

    False if a `GradScaler` skipped the update, and for a step that only holds the parameters with which a later first step
    begins.
    """
    found = {moment for number, moment in run.moments if number == step}
    is_beginning = found == {Moment.UPDATE} and not any(record.num_backwards for record in run.records[step])
    return not (is_beginning or all(record.num_skipped for record in run.records[step]))


def _moments_of_ranks(run: RecordedRun, steps: Sequence[int]) -> Iterator[Gap]:
    """Yield points in a step recorded by only some ranks in a pipeline stage."""
    for step in steps:
        on_rank = [{entry.moment for entry in record.entries} for record in run.records[step]]
        for stage in run.stages:
            common = set.intersection(*(on_rank[rank] for rank in stage)) | {Moment.ACCUMULATED}
            for rank in stage:
                for moment in sorted(on_rank[rank] - common, key=list(Moment).index):
                    lacking = [other for other in stage if moment not in on_rank[other]]
                    yield f"{name_ranks(lacking)} of {run.name} recorded no {_NOUNS[moment]} at step {step}", _AGAIN
                    return


def _moments_of_one_run(first: RecordedRun, second: RecordedRun, steps: Sequence[int]) -> Iterator[Gap]:
    """Yield points in a step recorded by only one run, although both runs have the step.

    State and buffers belong to the last step.
    """
    is_same_end = first.steps[-1] == second.steps[-1]
    for run, other in ((first, second), (second, first)):
        for moment in (Moment.START, Moment.STATE, Moment.BUFFER):
            found = [step for step in steps if (step, moment) in run.moments and (step, moment) not in other.moments]
            if found and (is_same_end or moment is Moment.START):
                yield f"only {run.name} has {_NOUNS[moment]} at {steps_in_words(found)}", _AGAIN
        clipped = [step for step in steps if any(record.clips for record in run.records[step]) and _makes_update(run, step)]
        if lacking := [step for step in clipped if (step, Moment.UNCLIPPED) not in run.moments]:
            yield f"{run.name} has no gradients before clipping in {steps_in_words(lacking)}", _AGAIN


def _samples(facts: Facts) -> Iterator[Gap]:
    lost = [_backwards_without_samples(facts, run, other) for run, other in (facts.runs, facts.runs[::-1])]
    # Later stages of a pipeline get activations, on a rank with several stages as well.
    has_all = not all(number for number, _ in lost) and all(found and not found.difference for found in facts.samples.values())
    for run, (number, total) in zip(facts.runs, lost, strict=True):
        if number and not has_all:
            yield f"{number} of {count(total, 'backward pass', 'backward passes')} of {run.name} had no samples", _INPUTS
    for run in facts.runs:
        if all(all_ranks_have_the_same(run, step) for step in facts.steps):
            gap = f"all ranks of {run.name} have the same samples, so a missing average over ranks would not show"
            yield gap, "give each rank samples of its own"
    for step, samples in facts.samples.items():
        if samples is not None and not samples.is_plausible:
            yield f"at step {step}, {samples.difference}", "gradients agree, so look for samples that have no effect on the loss"
            return


def _backwards_without_samples(facts: Facts, run: RecordedRun, other: RecordedRun) -> tuple[int, int]:
    """Count the backward passes without samples, and all backward passes."""
    lost = total = 0
    for step in facts.steps:
        for rank in input_ranks(run, step, other):
            record = run.records[step][rank]
            total += record.num_backwards
            lost += max(record.num_backwards - sum(map(bool, record.samples)), 0)
    return lost, total


def _without_update(facts: Facts) -> Iterator[Gap]:
    """Yield backward passes after a run's last step, if the other run goes on with an update."""
    for run, other in (facts.runs, facts.runs[::-1]):
        last = run.steps[-1]
        number = max(record.num_backwards_after for record in run.records[last])
        if number and other.steps[-1] > last and run.ranks[0].steps[-1].step == last:
            passes = count(number, "backward pass", "backward passes")
            yield (
                f"{passes} of {run.name} after step {last} led to no update",
                "look for an optimizer that misses its last update",
            )


def _drowned(first: RecordedRun, steps: Sequence[int], tolerance: Tolerance) -> Iterator[Gap]:
    """Yield steps in which the measured noise is as large as the values."""
    if not tolerance.moved:
        return
    for step in steps:
        for moment in _NEEDED:
            allowed = sum((NOISE * tolerance.noise((step, moment, name))) ** 2 for name in first.tensors_at(step, moment))
            if (step, moment) in first.moments and allowed >= first.norms[step, moment][0] > 0:
                gap = f"from step {step} on, rounding alone may change {_NOUNS[moment]} by as much as they are"
                yield gap, f"compare fewer steps, with --steps {steps.index(step)}" if step != steps[0] else ""
                return


def coverage_of(facts: Facts, compared: Sequence[TensorDifference]) -> Iterator[str]:
    """Yield clauses about the values that were compared, such as gradients, and about the gaps."""
    moments = {each.moment for each in compared}
    moments |= {Moment.SAMPLES} if any(facts.samples.values()) else set()
    moments |= {Moment.LOSS} if any(facts.losses.values()) else set()
    listed = ", ".join(moment.value for moment in Moment if moment in moments)
    number = sum(each.moment not in CLUES for each in compared)
    yield f"{listed}; {count(number, 'tensor')} in {steps_in_words(facts.steps)}"
    if partial := facts.first.partial | facts.second.partial:
        yield f"not compared: {count(len(partial), 'tensor')} with partial placements"
    for run, other in (facts.runs, facts.runs[::-1]):
        if left := sorted({*run.steps} - {*other.steps}):
            yield f"not compared: {steps_in_words(left)}, only in {run.name}"
        if alone := sorted({moment.value for _, moment in run.moments} - {moment.value for _, moment in other.moments}):
            yield f"not compared: {', '.join(alone)}, only in {run.name}"
