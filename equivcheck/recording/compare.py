"""`compare`: find the first tensor that differs between two recorded runs, whatever their layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.recording.assemble import Assembled, Cover, Part, assemble
from equivcheck.recording.sketch import Sketch
from equivcheck.recording.trace_file import Entry, Moment, RankTrace, read_trace
from equivcheck.worlds.trace.differences import Difference

FLOOR = 64.0
"""Rounding may change a tensor by this many machine epsilons, relative to its norm."""
NOISE = 4.0
"""Differences up to this many times the measured rounding noise are expected."""

Key = tuple[int, Moment, str]
"""Step, moment and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that differs between two runs."""

    step: int
    """Step, from 0."""
    moment: Moment
    """Moment within the step."""
    tensor: str
    """Name."""
    difference: Difference
    """Kind."""
    distance: float = 0.0
    """Estimated 2-norm; 0 unless values differ."""
    norm: float = 0.0
    """The tensor's 2-norm in the first run."""
    allowed: float = 0.0
    """Distance that rounding explains."""
    eps: float = 0.0
    """Machine epsilon for the dtype; 0 unless values differ."""
    detail: str = ""
    """Clause with both sides, such as ``shape (4, 3), not (4, 2)``."""

    @property
    def error(self) -> float:
        """Distance divided by the allowed distance; infinite unless values differ."""
        return self.distance / self.allowed if self.allowed else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceVerdict:
    """Result from `compare`."""

    outcome: Outcome
    """EQUIVALENT, DIVERGED or INCONCLUSIVE."""
    reason: str
    """One sentence."""
    differences: tuple[TensorDifference, ...] = ()
    """Tensors above their tolerance, in training order."""
    worst_error: float = 0.0
    """Largest error relative to tolerance, over all tensors."""
    coverage: tuple[str, ...] = ()
    """Compared moments and steps, and losses if a step differs: one clause each."""

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Outcome and evidence as text. `print(verdict)` shows it."""
        lines = [f"{self.outcome.value.upper()}: {self.reason}"]
        others = [line for line in map(_line, self.differences) if not self.reason.startswith(line)]
        lines += [f"  then {line}" for line in others[:_MOST]]
        left = len(others) - _MOST
        lines += [f"  and {left} more"] if left > 0 else []
        return "\n".join([*lines, *(f"  {each}" for each in self.coverage)])


_MOST = 8
"""Differences that `describe` prints."""


def _line(found: TensorDifference) -> str:
    place = f"step {found.step} {found.moment.value} {found.tensor}"
    if found.detail:
        return f"{place}: {found.detail}"
    return f"{place}: distance {found.distance:.3g}, norm {found.norm:.3g}, allowed {found.allowed:.3g}"


def compare(one: str | Path, other: str | Path, *, moved: Sequence[str | Path] = ()) -> TraceVerdict:
    """Compare two runs that `record` wrote. Layouts and numbers of ranks may differ.

    `moved` are runs like the first one, recorded with ``record(..., moved=1)``. They measure the rounding noise. Without them a
    difference above 64 machine epsilons proves nothing, unless initial values differ, tensors are missing, or ranks disagree.
    Raises `UsageError` if a folder is not a trace.
    """
    runs = [_read(Path(folder)) for folder in (one, other, *moved)]
    shared = [step for step in runs[0].steps if step in runs[1].steps]
    if not shared:
        raise UsageError(
            f"folders {one} and {other} are not valid together: they have no step in common. Expected the same `from_step`."
        )
    first, second, *noisy = runs
    differences, worst, num_compared = [], 0.0, 0
    keys = _keys(first, second, shared)
    for key in keys:
        found = _difference(key, first, second, noisy)
        num_compared += found.allowed > 0
        worst = max(worst, found.error if found.allowed else 0.0)
        if found.difference is not Difference.VALUE or not found.distance <= found.allowed:
            differences.append(found)
    outcome, reason = _judge(differences, worst, keys, is_measured=bool(noisy))
    coverage = _coverage((first, second), keys, num_compared)
    if differences:
        step = differences[0].step
        coverage = (
            f"loss at step {step}: {first.losses[step]:.6g} and {second.losses[step]:.6g}, averaged over ranks",
            *coverage,
        )
    return TraceVerdict(outcome=outcome, reason=reason, differences=tuple(differences), worst_error=worst, coverage=coverage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A recorded run, with each tensor added up over ranks."""

    steps: tuple[int, ...]
    tensors: Mapping[Key, tuple[Assembled[Sketch], tuple[Entry, ...]]]
    partial: frozenset[Key]
    """Tensors of which ranks hold addends. They are not compared, because the trace does not tell which ranks belong together."""
    norms: Mapping[tuple[int, Moment], tuple[float, int]]
    """Norm and number of elements over all tensors at a moment."""
    losses: Mapping[int, float]
    """Loss by step: the sum over backward passes, averaged over ranks."""


def _read(folder: Path) -> _Run:
    ranks = read_trace(folder)
    steps = tuple(step.step for step in ranks[0].steps if all(_has(rank, step.step) for rank in ranks))
    parts: dict[Key, list[tuple[int, Entry]]] = {}
    for rank in ranks:
        for step in rank.steps:
            for entry in step.entries if step.step in steps else ():
                parts.setdefault((step.step, entry.moment, entry.piece.name), []).append((rank.header.rank, entry))
    partial = {key for key, found in parts.items() if any(entry.is_partial for _, entry in found)}
    tensors = {key: (_assembled(found), tuple(entry for _, entry in found)) for key, found in parts.items() if key not in partial}
    norms: dict[tuple[int, Moment], tuple[float, int]] = {}
    for (number, moment, _), (found, entries) in tensors.items():
        squares, numel = norms.get((number, moment), (0.0, 0))
        own = found.value.squares if found.value is not None else 0.0
        norms[number, moment] = squares + own, numel + math.prod(entries[0].piece.shape)
    losses = {
        number: math.fsum(sum(step.losses) for rank in ranks for step in rank.steps if step.step == number) / len(ranks)
        for number in steps
    }
    return _Run(steps=steps, tensors=tensors, partial=frozenset(partial), norms=norms, losses=losses)


def _has(rank: RankTrace, step: int) -> bool:
    return any(each.step == step for each in rank.steps)


def _assembled(found: Sequence[tuple[int, Entry]]) -> Assembled[Sketch]:
    return assemble([Part(rank=rank, piece=entry.piece, value=entry.sketch) for rank, entry in found])


def _keys(first: _Run, second: _Run, shared: Sequence[int]) -> list[Key]:
    """Tensors in either run, in training order.

    Clipping is seen only if both runs call torch's functions, and state and buffers are read only after a run's last step.
    """
    order = list(Moment)
    read = [{key[:2] for key in run.tensors} for run in (first, second)]
    found = [
        key
        for key in dict.fromkeys([*first.tensors, *second.tensors])
        if key[0] in shared
        and key not in first.partial | second.partial
        and (key[1] not in _NOT_ALWAYS or all(key[:2] in each for each in read))
    ]
    return sorted(found, key=lambda key: (key[0], order.index(key[1])))


_NOT_ALWAYS = (Moment.UNCLIPPED, Moment.STATE, Moment.BUFFER)
"""Moments that a step of one run may lack although nothing is wrong."""


def _difference(key: Key, first: _Run, second: _Run, noisy: Sequence[_Run]) -> TensorDifference:
    """One tensor's difference. If both runs have it in the same shape and dtype, the kind is VALUE."""
    step, moment, name = key
    found = TensorDifference(step=step, moment=moment, tensor=name, difference=Difference.MISSING)
    if key not in first.tensors or key not in second.tensors:
        has, lacks = ("first", "second") if key in first.tensors else ("second", "first")
        return replace(found, detail=f"only the {has} run has it, not the {lacks}")
    (one, entries), (other, other_entries) = first.tensors[key], second.tensors[key]
    for kind, read in ((Difference.SHAPE, _shape), (Difference.DTYPE, _dtype)):
        if read(entries[0]) != read(other_entries[0]):
            return replace(found, difference=kind, detail=f"{read(other_entries[0])}, not {read(entries[0])}")
    for which, assembled in (("first", one), ("second", other)):
        if assembled.cover is not Cover.ONCE:
            why = "some elements are on no rank" if assembled.cover is Cover.HOLES else "parts of ranks overlap"
            return replace(found, detail=f"in the {which} run {why}")
    assert one.value is not None
    assert other.value is not None
    eps = torch.finfo(getattr(torch, entries[0].dtype)).eps
    allowed = FLOOR * eps * _size(key, first) + NOISE * _noise(key, one.value, noisy)
    for which, assembled in (("first", one), ("second", other)):
        for replicas in assembled.replicas:
            apart = max(part.value.distance(replicas[0].value) for part in replicas)
            if not apart <= allowed:
                ranks = ", ".join(str(part.rank) for part in replicas)
                detail = f"ranks {ranks} of the {which} run disagree by {apart:.3g}, allowed {allowed:.3g}"
                return replace(found, difference=Difference.RANKS_DISAGREE, detail=detail)
    distance = one.value.distance(other.value)
    if moment is Moment.START and distance > allowed and _anywhere(entries) == _anywhere(other_entries):
        found = replace(found, detail="both runs have the same numbers, but in other places")
    if not math.isfinite(distance):
        return replace(found, difference=Difference.NAN, detail="a value is NaN or infinite")
    return replace(found, difference=Difference.VALUE, distance=distance, norm=one.value.norm, allowed=allowed, eps=eps)


def _anywhere(entries: Sequence[Entry]) -> int | None:
    """Hash that ignores where the numbers are."""
    parts = [Part(rank=0, piece=entry.piece, value=entry.exact) for entry in entries if entry.exact is not None]
    value = assemble(parts).value if parts else None
    return None if value is None else value.anywhere


def _shape(entry: Entry) -> str:
    return f"shape {entry.piece.shape}"


def _dtype(entry: Entry) -> str:
    return entry.dtype


def _size(key: Key, run: _Run) -> float:
    """The tensor's norm plus its share in the norm over all tensors.

    A gradient may be zero but for rounding, as that of a bias before a norm, so its own norm is not enough.
    """
    found, entries = run.tensors[key]
    assert found.value is not None
    total, total_numel = run.norms[key[0], key[1]]
    return found.value.norm + math.sqrt(total * math.prod(entries[0].piece.shape) / total_numel)


def _noise(key: Key, value: Sketch, noisy: Sequence[_Run]) -> float:
    """Largest distance to a moved run."""
    others = [run.tensors[key][0].value for run in noisy if key in run.tensors]
    return max((value.distance(other) for other in others if other is not None), default=0.0)


def _coverage(runs: Sequence[_Run], keys: Sequence[Key], num_compared: int) -> tuple[str, ...]:
    """Say which moments and steps were compared, and which only one run has."""
    moments = [moment.value for moment in Moment if any(key[1] is moment for key in keys)]
    found = [f"compared: {', '.join(moments)}; {num_compared} tensors in {_steps(sorted({key[0] for key in keys}))}"]
    num_partial = len(runs[0].partial | runs[1].partial)
    found += [f"not compared: {num_partial} tensors with partial placements"] if num_partial else []
    clips = [any(key[1] is Moment.UNCLIPPED for key in run.tensors) for run in runs]
    if clips[0] != clips[1]:
        found.append(f"only the {'first' if clips[0] else 'second'} run clips by a function of torch")
    for which, own, other in (("first", runs[0], runs[1]), ("second", runs[1], runs[0])):
        left = sorted(set(own.steps) - set(other.steps))
        found += [f"only in the {which} run: {_steps(left)}"] if left else []
    return tuple(found)


def _judge(
    differences: Sequence[TensorDifference], worst: float, keys: Sequence[Key], *, is_measured: bool
) -> tuple[Outcome, str]:
    """Outcome and reason. Without measured noise, only differences that rounding never makes are certain."""
    start = {key for key in keys if key[1] is Moment.START}
    begins_alike = bool(start) and not any(each.moment is Moment.START for each in differences)
    certain = [each for each in differences if is_measured or _is_certain(each, begins_alike and each.step == keys[0][0])]
    if certain:
        return Outcome.DIVERGED, _line(certain[0])
    if differences:
        advice = "Rounding may explain it: record the first run again with moved=1, and pass that run as moved"
        return Outcome.INCONCLUSIVE, f"{_line(differences[0])}. {advice}"
    if not {Moment.GRADIENT, Moment.UPDATE} <= {key[1] for key in keys}:
        return Outcome.INCONCLUSIVE, "gradients or parameters were not recorded"
    return Outcome.EQUIVALENT, f"the largest error is {worst:.2g} of its tolerance"


def _is_certain(found: TensorDifference, is_first_step: bool) -> bool:
    """Whether rounding cannot explain it: a missing tensor, another start, or first gradients with half their digits wrong."""
    if found.moment is Moment.START or found.difference not in (Difference.VALUE, Difference.RANKS_DISAGREE):
        return True
    is_gradient = found.moment in (Moment.UNCLIPPED, Moment.GRADIENT)
    return is_gradient and is_first_step and found.error * FLOOR * found.eps > math.sqrt(found.eps)


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    is_range = list(steps) == list(range(steps[0], steps[-1] + 1))
    return f"steps {steps[0]} to {steps[-1]}" if is_range else f"steps {', '.join(map(str, steps))}"
