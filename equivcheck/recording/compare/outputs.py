"""Compare module outputs, added up over microbatches and data-parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from equivcheck.recording.compare.runs import RecordedRun, eps_of
from equivcheck.recording.compare.samples import Samples
from equivcheck.recording.compare.tensors import FLOOR, NOISE, Tolerance
from equivcheck.recording.compare.verdict import TensorDifference
from equivcheck.recording.sketch import Sketch
from equivcheck.recording.trace import Moment, Output
from equivcheck.worlds.trace.differences import Difference

Call = tuple[str, int]
"""Key for a module call: the module's name, and how many calls came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullOutput:
    """The output of one module call over all samples in a step, added up from microbatches and ranks."""

    output: Output
    """The record from one rank and one microbatch. The other records have the same module and shape."""
    samples: Samples
    """Samples in the output."""
    sketch: Sketch
    """Sketch of the output, added up over distinct microbatches."""


def compare_outputs(first: RecordedRun, second: RecordedRun, step: int, tolerance: Tolerance) -> Iterator[TensorDifference]:
    """Compare module outputs of both runs in one step, in call order.

    An output is compared only if both runs have it for the same samples, with the same shape.
    """
    one, other = full_outputs(first, step), full_outputs(second, step)
    moved = [full_outputs(run, step) for run in tolerance.moved]
    for call, mine in one.items():
        yours = other.get(call)
        if yours is None or not _is_same_form(mine, yours):
            continue
        rerun = [found[call] for found in moved if call in found and _is_same_form(mine, found[call])]
        noise = max((mine.sketch.distance(each.sketch) for each in rerun), default=0.0)
        eps = max(eps_of(mine.output.dtype), eps_of(yours.output.dtype))
        module, number = call
        yield TensorDifference(
            step=step,
            moment=Moment.OUTPUT,
            tensor=(module or "the model") + (f", call {number}" if number else ""),
            difference=Difference.VALUE,
            distance=mine.sketch.distance(yours.sketch),
            norm=mine.sketch.norm,
            allowed=FLOOR * eps * mine.sketch.norm + NOISE * noise,
            eps=eps,
        )


def _is_same_form(one: FullOutput, other: FullOutput) -> bool:
    return one.output.shape == other.output.shape and one.samples == other.samples


def full_outputs(run: RecordedRun, step: int) -> dict[Call, FullOutput]:
    """Return a step's module outputs over all samples, in call order.

    An output is left out if ranks with the same samples disagree, or if microbatches overlap in some samples.
    """
    found: dict[Call, dict[tuple[int, ...], list[Output]]] = {}
    for record in run.records[step]:
        for output in record.outputs:
            samples = tuple(sorted(record.samples[output.microbatch])) if output.microbatch < len(record.samples) else ()
            found.setdefault((output.module, output.call), {}).setdefault(samples, []).append(output)
    added = {call: _added(parts) for call, parts in found.items()}
    return {call: output for call, output in added.items() if output is not None}


def _added(parts: dict[tuple[int, ...], list[Output]]) -> FullOutput | None:
    outputs = [output for replicas in parts.values() for output in replicas]
    samples = Counter(sample for microbatch in parts for sample in microbatch)
    has_overlap = len(samples) < sum(len(set(microbatch)) for microbatch in parts)
    if () in parts or has_overlap or len({(output.shape, output.dtype) for output in outputs}) > 1:
        return None
    for replicas in parts.values():
        allowed = FLOOR * eps_of(replicas[0].dtype) * replicas[0].sketch.norm
        if not all(each.sketch.distance(replicas[0].sketch) <= allowed for each in replicas):
            return None
    first, *others = [replicas[0] for replicas in parts.values()]
    sketch = first.sketch
    for output in others:
        sketch = sketch + output.sketch
    return FullOutput(output=first, samples=samples, sketch=sketch)
