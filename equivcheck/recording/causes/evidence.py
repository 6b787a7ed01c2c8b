"""Signed sums of two recorded runs near their first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from equivcheck.recording.assemble import Assembled, Cover, Part, assemble
from equivcheck.recording.compare.runs import Key, RecordedRun
from equivcheck.recording.compare.verdict import relative_error
from equivcheck.recording.sketch import Sketch
from equivcheck.recording.trace import Entry, Moment, RecordedStep

Sums = npt.NDArray[np.float64]
Tensors = Mapping[str, Sums]
"""Signed sums by tensor name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Two recorded runs, and the point in training at which they first differ."""

    first: RecordedRun
    """The right run."""
    second: RecordedRun
    """The run to explain."""
    tolerance: Callable[[Key], float]
    """Function that returns the distance allowed for a tensor in the first run."""
    step: int
    """Step with the first difference."""
    moment: Moment
    """Point in the step (`Moment`) with the first difference."""
    wrong: tuple[str, ...]
    """Names for which both runs differ at `step` and `moment`."""
    is_one_rank: bool = False
    """Whether the second run contains the record of one rank only."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors to compare at `step` and `moment`.

        Both runs recorded all elements in these tensors, in floating point and without NaN.
        """
        return tuple(
            name for name in self.first.tensors_at(self.step, self.moment) if self._is_comparable((self.step, self.moment, name))
        )

    def _is_comparable(self, key: Key) -> bool:
        found = [run.tensors.get(key) for run in (self.first, self.second)]
        return (
            all(each is not None and each.sketch.cover is Cover.ONCE and each.is_finite and bool(each.eps) for each in found)
            and len({each.shapes for each in found if each is not None}) == 1
        )

    @cached_property
    def expected_sums(self) -> Tensors:
        """The first run's signed sums for each tensor at `step` and `moment`."""
        return self.sums(self.first, self.step, self.moment)

    @cached_property
    def found_sums(self) -> Tensors:
        """The second run's signed sums for each tensor at `step` and `moment`.

        If replicas differ, these are the sums of the replica on the lowest rank.
        """
        return self.sums(self.second, self.step, self.moment)

    @cached_property
    def limits(self) -> Mapping[str, float]:
        """Allowed distance between both runs, for each tensor at `step` and `moment`."""
        return {name: self.tolerance((self.step, self.moment, name)) for name in self.names}

    @cached_property
    def spreads(self) -> Mapping[str, float]:
        """Largest distance between replicas in the second run, for each tensor at `step` and `moment`."""
        return {name: spread(self.second_tensor(name)) for name in self.names}

    def second_tensor(self, name: str) -> Assembled[Sketch]:
        """Return the second run's tensor `name` at `step` and `moment`."""
        return self.second.tensors[self.step, self.moment, name].sketch

    def sums(self, run: RecordedRun, step: int, moment: Moment) -> Tensors:
        """Return the signed sums for all complete tensors that `run` recorded at a step and moment."""
        return {
            name: tensor.sketch.value.sums
            for name, tensor in run.tensors_at(step, moment).items()
            if tensor.sketch.value is not None and tensor.is_finite
        }

    def trivial_error(self, name: str) -> float:
        """Error of the tensor `name` if no mistake is assumed.

        This is the distance between both runs or between replicas, divided by the allowed distance.
        """
        apart = rms(self.found_sums[name] - self.expected_sums[name])
        return relative_error(max(apart, self.spreads[name]), self.limits[name])


def ranks_with_other_values(evidence: Evidence, name: str) -> set[int]:
    """Return the ranks without a correct full replica of the tensor `name`.

    Ranks with a shard are always returned.
    """
    tensor = evidence.second.tensors[evidence.step, evidence.moment, name]
    right = {
        rank
        for rank, entry in zip(tensor.ranks, tensor.entries, strict=True)
        if entry.piece.numel == tensor.numel and rms(entry.sketch.sums - evidence.expected_sums[name]) <= evidence.limits[name]
    }
    return {trace.header.rank for trace in evidence.second.ranks} - right


def only_rank(run: RecordedRun, rank: int, step: int) -> RecordedRun:
    """Return the run with only one rank's records. Tensors are kept for `step`, and for the steps right before and after it."""
    at = [trace.header.rank for trace in run.ranks].index(rank)
    tensors = {}
    for key, tensor in run.tensors.items():
        own = [entry for each, entry in zip(tensor.ranks, tensor.entries, strict=True) if each == rank]
        if own and abs(key[0] - step) <= 1:
            sketch = assemble([Part(rank=rank, piece=entry.piece, value=entry.sketch) for entry in own])
            tensors[key] = replace(tensor, ranks=(rank,) * len(own), entries=tuple(own), sketch=sketch)
    records = {number: (found[at],) for number, found in run.records.items()}
    return replace(run, ranks=(run.ranks[at],), records=records, tensors=tensors)


def rms(sums: Sums) -> float:
    """Estimate a tensor's 2-norm from its signed sums: their root mean square."""
    return float(np.sqrt(np.mean(sums**2)))


def spread(tensor: Assembled[Sketch]) -> float:
    """Largest distance between replicas of a tensor."""
    return max((part.value.distance(group[0].value) for group in tensor.replicas for part in group), default=0.0)


def linear_combination(*terms: tuple[float, Tensors]) -> dict[str, Sums]:
    """Return the weighted sum over several terms for each tensor name.

    A term is a factor with tensors. Names missing in any term are left out.
    """
    names = [name for name in terms[0][1] if all(name in tensors for _, tensors in terms)]
    return {name: np.sum([factor * tensors[name] for factor, tensors in terms], axis=0) for name in names}


def mean_of_replicas(tensor: Assembled[Sketch]) -> Sums | None:
    """Signed sums for a full tensor whose elements are means over replicas; None if elements are missing."""
    return _with_replicas(tensor, lambda group: np.mean(group, axis=0))


def sum_of_replicas(tensor: Assembled[Sketch]) -> Sums | None:
    """Signed sums for a full tensor whose elements are sums over replicas; None if elements are missing."""
    return _with_replicas(tensor, lambda group: np.sum(group, axis=0))


def _with_replicas(tensor: Assembled[Sketch], total: Callable[[list[Sums]], Sums]) -> Sums | None:
    if tensor.value is None:
        return None
    sums = tensor.value.sums
    for group in tensor.replicas:
        sums = sums - group[0].value.sums + total([part.value.sums for part in group])
    return sums


def full_tensors(found: Mapping[str, Assembled[Sketch]], total: Callable[[Assembled[Sketch]], Sums | None]) -> Tensors:
    """Signed sums of all tensors without missing elements. `total` is `mean_of_replicas` or `sum_of_replicas`."""
    return {name: value for name, tensor in found.items() if (value := total(tensor)) is not None}


def steps_of(run: RecordedRun, number: int) -> Iterator[tuple[int, RecordedStep]]:
    """Yield each rank with its record of step `number`."""
    return zip((trace.header.rank for trace in run.ranks), run.records.get(number, ()), strict=False)


def entries_of(run: RecordedRun, number: int, moment: Moment) -> Iterator[tuple[int, Entry]]:
    """Yield each rank with each tensor part that it recorded at a step and moment. Partial sums are left out."""
    for tensor in run.tensors_at(number, moment).values():
        yield from (each for each in zip(tensor.ranks, tensor.entries, strict=True) if each[1].addends is None)


def accumulated_gradients(run: RecordedRun, number: int, microbatch: int) -> dict[str, Assembled[Sketch]]:
    """Return the gradients that were recorded right before a step's backward pass number `microbatch`."""
    parts: dict[str, list[Part[Sketch]]] = {}
    for rank, record in steps_of(run, number):
        for entry in record.entries:
            if entry.moment is Moment.ACCUMULATED and entry.microbatch == microbatch and entry.addends is None:
                parts.setdefault(entry.piece.name, []).append(Part(rank=rank, piece=entry.piece, value=entry.sketch))
    return {name: assemble(found) for name, found in parts.items()}


def num_microbatches(run: RecordedRun, number: int) -> int:
    """Return how many backward passes a step has, or 1 if this is unknown."""
    return max((step.num_backwards for _, step in steps_of(run, number)), default=1) or 1


def num_data_ranks(run: RecordedRun, number: int) -> int:
    """Return how many ranks have different samples. If samples were not recorded, all ranks count."""
    samples = {step.samples for _, step in steps_of(run, number) if any(step.samples)}
    return len(samples) or len(run.ranks)


def increments(run: RecordedRun, number: int, final: Tensors) -> list[dict[str, Sums]]:
    """Return the gradients that each microbatch in a step added.

    `final` are the gradients at the step's end. Empty if accumulated gradients were not recorded. If gradients are not reduced
    yet, their mean over ranks counts.
    """
    count = num_microbatches(run, number)
    before: list[Tensors] = []
    for microbatch in range(count):
        before.append(full_tensors(accumulated_gradients(run, number, microbatch), mean_of_replicas))
        if microbatch and not before[-1]:
            return []
    nothing: Sums = np.zeros_like(next(iter(final.values()))) if final else np.zeros(0)
    states: Sequence[Tensors] = [*before, final]
    return [{name: states[at + 1].get(name, nothing) - states[at].get(name, nothing) for name in final} for at in range(count)]
