"""Compares two runs if an optimizer updates copies in another dtype than the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from equivcheck.recording.compare.runs import Key, RecordedRun, eps_of
from equivcheck.recording.trace import Moment


def match_copies(
    first: RecordedRun, second: RecordedRun, noisy: Sequence[RecordedRun]
) -> tuple[RecordedRun, RecordedRun, tuple[RecordedRun, ...], list[str]]:
    """Choose which tensors are compared for each parameter: the optimizer's copies, or the model's own parameters.

    If both runs have copies, the copies are compared, and the model's parameters too. If only one run has copies, they are
    compared with the other run's parameters, but only if both have the same dtype. `noisy` are the runs with perturbed initial
    parameters. Returns all three arguments with the chosen tensors, and clauses about copies in one run only.
    """
    one, other = _with_chosen(first, second), _with_chosen(second, first)
    notes = []
    for which, own, others in ((first.name, first, second), (second.name, second, first)):
        dtypes = sorted({tensor.dtypes[0] for key, tensor in own.rounded.items() if key not in others.rounded})
        if dtypes:
            notes.append(f"only {which} updates copies of its {' and '.join(dtypes)} parameters, so rounding allows more")
    return one, other, tuple(_with_chosen(run, one) for run in noisy), notes


def _with_chosen(run: RecordedRun, other: RecordedRun) -> RecordedRun:
    tensors = dict(run.tensors)
    for key, tensor in run.rounded.items():
        step, moment, name = key
        own_name = step, moment, f"{name} ({tensor.dtypes[0]})"
        if key in other.rounded or own_name in other.tensors:
            tensors[own_name] = tensor
        elif key in other.tensors and other.tensors[key].dtypes == tensor.dtypes:
            tensors[key] = tensor
    return replace(run, tensors=tensors)


def rounding_of(key: Key, first: RecordedRun, second: RecordedRun) -> float:
    """Estimate the distance between a tensor in one run and in the other, if rounding changes values by one machine epsilon.

    If both runs update copies, the tensor has the rounding error of the copies' dtype. Its change since the start has the
    rounding error of the model's coarser dtype.
    """
    one, other = first.tensors[key], second.tensors[key]
    coarse, start = max(one.eps, other.eps), first.tensors.get((0, Moment.START, key[2]))
    is_copied = key[1] in (Moment.START, Moment.UPDATE) and one.model_dtype and other.model_dtype
    size = first.size(key)
    if not is_copied or start is None or start.sketch.value is None or one.sketch.value is None:
        return coarse * size
    return eps_of(one.dtypes[0]) * size + coarse * one.sketch.value.distance(start.sketch.value)
