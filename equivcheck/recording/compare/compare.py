"""`compare`: find the first tensor that differs between two recorded runs, whatever their layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.recording.assemble import Cover
from equivcheck.recording.compare.runs import Key, RecordedRun, RecordedTensor, read_run
from equivcheck.recording.compare.verdict import TensorDifference, TraceVerdict
from equivcheck.recording.trace import Moment
from equivcheck.worlds.trace.differences import Difference

FLOOR = 64.0
"""Rounding may change a tensor by this many machine epsilons, relative to its norm."""
NOISE = 4.0
"""Differences up to this many times the measured rounding noise are expected."""
_NOT_ALWAYS = (Moment.UNCLIPPED, Moment.STATE, Moment.BUFFER)
"""Moments compared only if both runs have them.

Clipping by other means than torch's functions is not seen, and state and buffers are read only after a run's last step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs, and everything that was compared in them."""

    first: RecordedRun
    """First run."""
    second: RecordedRun
    """Second run."""
    tensors: tuple[TensorDifference, ...]
    """Compared tensors in training order, also those that agree."""
    verdict: TraceVerdict
    """Verdict."""


def compare(one: str | Path, other: str | Path, *, moved: Sequence[str | Path] = ()) -> TraceVerdict:
    """Compare two runs that `record` wrote. Layouts and numbers of ranks may differ.

    `moved` are runs like the first one, recorded with ``record(..., moved=1)``. They measure the rounding noise. Without them, a
    difference is DIVERGED only if rounding cannot make it: other initial parameters, missing tensors, NaN in one run, or first
    gradients that are wrong by more than sqrt(eps) times their norm. Raises `UsageError` if a folder is not a trace.
    """
    return compare_everything(one, other, moved=moved).verdict


def compare_everything(one: str | Path, other: str | Path, *, moved: Sequence[str | Path] = ()) -> Comparison:
    """Compare two runs, and keep the tensors that agree as well. Arguments and errors are those of `compare`."""
    first, second, *noisy = (read_run(Path(folder)) for folder in (one, other, *moved))
    shared = sorted({*first.steps} & {*second.steps})
    if not shared:
        raise UsageError(
            f"folders {one} and {other} are not valid together: they have no step in common. Expected the same `from_step`."
        )
    keys = _keys(first, second, shared)
    found = [_difference(key, first, second, noisy) for key in keys]
    differences = [each for each in found if each.is_different]
    worst = max((each.error for each in found if each.difference is Difference.VALUE), default=0.0)
    outcome, reason = _judge(differences, worst, keys, is_measured=bool(noisy))
    coverage = [*_coverage(first, second, keys)]
    if differences:
        step = differences[0].step
        losses = f"{first.loss(step):.6g} and {second.loss(step):.6g}"
        coverage.insert(0, f"loss at step {step}: {losses}, averaged over ranks")
    verdict = TraceVerdict(
        outcome=outcome, reason=reason, differences=tuple(differences), worst_error=worst, coverage=tuple(coverage)
    )
    return Comparison(first=first, second=second, tensors=tuple(found), verdict=verdict)


def _keys(first: RecordedRun, second: RecordedRun, shared: Sequence[int]) -> list[Key]:
    """Tensors in either run, in training order."""
    order, in_both = list(Moment), first.moments & second.moments
    found = [
        key
        for key in dict.fromkeys([*first.tensors, *second.tensors])
        if key[0] in shared and key not in first.partial | second.partial and (key[1] not in _NOT_ALWAYS or key[:2] in in_both)
    ]
    return sorted(found, key=lambda key: (key[0], order.index(key[1])))


def _difference(key: Key, first: RecordedRun, second: RecordedRun, noisy: Sequence[RecordedRun]) -> TensorDifference:
    """One tensor's difference. If both runs have it in the same form, without NaN, and replicas agree, the kind is VALUE."""
    step, moment, name = key
    found = TensorDifference(step=step, moment=moment, tensor=name, difference=Difference.MISSING)
    one, other = first.tensors.get(key), second.tensors.get(key)
    if one is None or other is None:
        has, lacks = ("first", "second") if other is None else ("second", "first")
        return replace(found, detail=f"only the {has} run has it, not the {lacks}")
    forms = ((Difference.SHAPE, one.shapes, other.shapes), (Difference.DTYPE, one.dtypes, other.dtypes))
    for kind, expected, actual in forms:
        if len({*expected, *actual}) > 1:
            return replace(found, difference=kind, detail=f"{' and '.join(actual)}, not {' and '.join(expected)}")
    for which, tensor in (("first", one), ("second", other)):
        if tensor.sketch.cover is not Cover.ONCE:
            why = "some elements are on no rank" if tensor.sketch.cover is Cover.HOLES else "parts of ranks overlap"
            return replace(found, detail=f"in the {which} run {why}")
    if not (one.is_finite and other.is_finite):
        return _not_finite(found, one, other)
    found = replace(found, eps=one.eps, allowed=FLOOR * one.eps * _size(key, first) + NOISE * _noise(key, first, noisy))
    return _value_difference(found, one, other)


def _not_finite(found: TensorDifference, one: RecordedTensor, other: RecordedTensor) -> TensorDifference:
    is_undecided = not (one.is_finite or other.is_finite)
    which = "both runs have" if is_undecided else f"the {'second' if one.is_finite else 'first'} run has"
    detail = f"{which} NaN or infinite values"
    return replace(found, difference=Difference.NAN, detail=detail, is_undecided=is_undecided)


def _value_difference(found: TensorDifference, one: RecordedTensor, other: RecordedTensor) -> TensorDifference:
    for which, tensor in (("first", one), ("second", other)):
        for replicas in tensor.sketch.replicas:
            apart = max(part.value.distance(replicas[0].value) for part in replicas)
            if apart > found.allowed:
                ranks = ", ".join(str(part.rank) for part in replicas)
                detail = f"ranks {ranks} of the {which} run disagree by {apart:.3g}, allowed {found.allowed:.3g}"
                return replace(found, difference=Difference.RANKS_DISAGREE, distance=apart, detail=detail)
    before, after = one.sketch.value, other.sketch.value
    assert before is not None
    assert after is not None
    distance, detail = before.distance(after), ""
    if found.moment is Moment.START and distance > found.allowed and one.hash_anywhere == other.hash_anywhere:
        detail = "both runs have the same numbers, but in other places"
    return replace(found, difference=Difference.VALUE, distance=distance, norm=before.norm, detail=detail)


def _size(key: Key, run: RecordedRun) -> float:
    """The tensor's norm plus its share in the norm over all tensors.

    A gradient may be zero but for rounding, as that of a bias before a norm, so its own norm is not enough.
    """
    tensor = run.tensors[key]
    assert tensor.sketch.value is not None
    squares, numel = run.norms[key[:2]]
    return tensor.sketch.value.norm + math.sqrt(squares * tensor.numel / numel)


def _noise(key: Key, run: RecordedRun, noisy: Sequence[RecordedRun]) -> float:
    """Largest distance to a moved run."""
    value = run.tensors[key].sketch.value
    others = [moved.tensors[key].sketch.value for moved in noisy if key in moved.tensors]
    return max((value.distance(other) for other in others if value is not None and other is not None), default=0.0)


def _judge(
    differences: Sequence[TensorDifference], worst: float, keys: Sequence[Key], *, is_measured: bool
) -> tuple[Outcome, str]:
    """Outcome and reason. Without measured noise, only differences that rounding never makes are certain."""
    has_start = any(key[1] is Moment.START for key in keys)
    starts_equal = has_start and not any(each.moment is Moment.START for each in differences)
    certain = [
        each
        for each in differences
        if not each.is_undecided and (is_measured or _is_certain(each, starts_equal and each.step == keys[0][0]))
    ]
    if certain:
        return Outcome.DIVERGED, str(certain[0])
    if differences and differences[0].is_undecided:
        return Outcome.INCONCLUSIVE, str(differences[0])
    if differences:
        advice = "Rounding may explain it: record the first run again with moved=1, and pass that run as moved"
        return Outcome.INCONCLUSIVE, f"{differences[0]}. {advice}"
    if not {Moment.GRADIENT, Moment.UPDATE} <= {key[1] for key in keys}:
        return Outcome.INCONCLUSIVE, "gradients or parameters were not recorded"
    return Outcome.EQUIVALENT, f"the largest error is {worst:.2g} of its tolerance"


def _is_certain(found: TensorDifference, is_first_step: bool) -> bool:
    """Whether rounding cannot explain it: a missing tensor, another start, or first gradients with half their digits wrong."""
    if found.moment is Moment.START or found.difference not in (Difference.VALUE, Difference.RANKS_DISAGREE):
        return True
    if not found.eps:
        return True  # integers are not rounded
    is_gradient = found.moment in (Moment.UNCLIPPED, Moment.GRADIENT)
    # `allowed` is FLOOR * eps * size, and the distance must be above sqrt(eps) * size.
    return is_gradient and is_first_step and found.error * FLOOR * found.eps > math.sqrt(found.eps)


def _coverage(first: RecordedRun, second: RecordedRun, keys: Sequence[Key]) -> Iterator[str]:
    """Say which moments and steps were compared, and how the runs differ besides."""
    moments = [moment.value for moment in Moment if any(key[1] is moment for key in keys)]
    yield f"compared: {', '.join(moments)}; {len(keys)} tensors in {_steps(sorted({key[0] for key in keys}))}"
    if partial := first.partial | second.partial:
        yield f"not compared: {len(partial)} tensors with partial placements"
    clips = [any(moment is Moment.UNCLIPPED for _, moment in run.moments) for run in (first, second)]
    if clips[0] != clips[1]:
        yield f"only the {'first' if clips[0] else 'second'} run clips by a function of torch"
    environments = [run.ranks[0].header.environment for run in (first, second)]
    for name in sorted({*environments[0], *environments[1]}):
        one, other = (environment.get(name, "not set") for environment in environments)
        if one != other:
            yield f"{name}: {one} and {other}"
    for which, own, others in (("first", first, second), ("second", second, first)):
        if left := sorted({*own.steps} - {*others.steps}):
            yield f"only in the {which} run: {_steps(left)}"
        if some := sorted({step.step for rank in own.ranks for step in rank.steps} - {*own.steps}):
            yield f"only on some ranks of the {which} run: {_steps(some)}"
        if any(rank.is_cut_off for rank in own.ranks):
            yield f"the {which} run was killed while it wrote a step"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    is_range = list(steps) == list(range(steps[0], steps[-1] + 1))
    return f"steps {steps[0]} to {steps[-1]}" if is_range else f"steps {', '.join(map(str, steps))}"
