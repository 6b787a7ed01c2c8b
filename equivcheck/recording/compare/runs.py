"""Recorded runs, in which each tensor is added up over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from equivcheck.errors import UsageError
from equivcheck.recording.assemble import Assembled, Part, assemble
from equivcheck.recording.exact import ExactHash
from equivcheck.recording.sketch import Sketch
from equivcheck.recording.trace import OUTPUT_DTYPES, Entry, Moment, RankTrace, RecordedStep
from equivcheck.recording.trace_file import read_trace
from equivcheck.scenario.scenario import count
from equivcheck.worlds.trace.trace import Piece

Key = tuple[int, Moment, str]
"""Step, point in the step (`Moment`), and name of a tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTensor:
    """One tensor at one point in training, as all ranks recorded it."""

    ranks: tuple[int, ...]
    """The rank that recorded each entry in `entries`."""
    entries: tuple[Entry, ...]
    """The tensor's parts, one or more from each rank."""
    sketch: Assembled[Sketch]
    """Sketch of the full tensor, added up over ranks."""

    @property
    def numel(self) -> int:
        """Number of elements in the full tensor."""
        return math.prod(self.entries[0].piece.shape)

    @cached_property
    def distinct(self) -> tuple[Entry, ...]:
        """All ranks' entries with different values. Several ranks with equal replicas give one entry."""
        return tuple({id(entry): entry for entry in self.entries}.values())

    @cached_property
    def shapes(self) -> tuple[str, ...]:
        """Full shape as text. It contains several shapes if ranks disagree."""
        return tuple(f"shape {shape}" for shape in dict.fromkeys(entry.piece.shape for entry in self.distinct))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Element type. It contains several types if ranks disagree."""
        return tuple(dict.fromkeys(entry.dtype for entry in self.distinct))

    @cached_property
    def model_dtype(self) -> str:
        """The model parameter's element type, if this tensor is a copy in another dtype; otherwise empty."""
        return next((entry.model_dtype for entry in self.distinct if entry.model_dtype), "")

    @cached_property
    def eps(self) -> float:
        """Machine epsilon for the dtype, or for the model's dtype if that is coarser; 0 for integers."""
        return max(eps_of(dtype) for dtype in (self.entries[0].dtype, self.model_dtype) if dtype)

    @cached_property
    def is_finite(self) -> bool:
        """Whether no rank has NaN or an infinite value."""
        return all(math.isfinite(entry.sketch.minimum) and math.isfinite(entry.sketch.maximum) for entry in self.distinct)

    @property
    def exact(self) -> ExactHash | None:
        """Exact hash of the full tensor; None if it was not recorded, or if the parts do not cover the tensor once."""
        parts = [
            Part(rank=rank, piece=entry.piece, value=entry.exact)
            for rank, entry in zip(self.ranks, self.entries, strict=True)
            if entry.exact is not None
        ]
        return assemble(parts).value if parts else None


def eps_of(dtype: str) -> float:
    """Machine epsilon of a dtype; 0 for integers and booleans."""
    found = getattr(torch, dtype)
    return torch.finfo(found).eps if found.is_floating_point else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRun:
    """One run with all ranks' records, as `record` wrote it."""

    name: str
    """Name in texts: A or B, or the folder of a moved run."""
    folder: Path
    """Folder with its trace files."""
    ranks: tuple[RankTrace, ...]
    """Contents of the trace files, one for each rank."""
    steps: tuple[int, ...]
    """Steps that all ranks have recorded, in order."""
    records: Mapping[int, tuple[RecordedStep, ...]]
    """Each step as all ranks have recorded it, in rank order."""
    tensors: Mapping[Key, RecordedTensor]
    """Tensors at each step and moment. Accumulated gradients are not included, nor tensors in `partial`."""
    rounded: Mapping[Key, RecordedTensor]
    """Parameters in the model's dtype, if an optimizer updates copies of them in another dtype. The copies are in `tensors`."""
    partial: frozenset[Key]
    """Tensors whose DTensor has a partial placement other than a sum, such as a maximum. They are not compared."""

    @cached_property
    def norms(self) -> Mapping[tuple[int, Moment], tuple[float, int]]:
        """Return the sum of squares over all tensors and their number of elements, for each step and moment.

        The sum leaves out integers and tensors with NaN or infinite values.
        """
        norms = {}
        for place, tensors in self._by_moment.items():
            values = [each.sketch.value for each in tensors.values() if each.eps and each.is_finite]
            squares = sum(value.squares for value in values if value is not None)
            norms[place] = squares, sum(each.numel for each in tensors.values())
        return norms

    @cached_property
    def moments(self) -> frozenset[tuple[int, Moment]]:
        """Steps and moments at which at least one tensor was recorded."""
        return frozenset(self._by_moment)

    @cached_property
    def _by_moment(self) -> Mapping[tuple[int, Moment], Mapping[str, RecordedTensor]]:
        found: dict[tuple[int, Moment], dict[str, RecordedTensor]] = {}
        for (step, moment, name), tensor in self.tensors.items():
            found.setdefault((step, moment), {})[name] = tensor
        return found

    def tensors_at(self, step: int, moment: Moment) -> Mapping[str, RecordedTensor]:
        """Return the tensors recorded at a step and moment, by name."""
        return self._by_moment.get((step, moment), {})

    @cached_property
    def output_eps(self) -> float:
        """Machine epsilon of the coarsest dtype among module outputs; 0 if no dtype was recorded."""
        listed = {rank.header.environment.get(OUTPUT_DTYPES, "") for rank in self.ranks}
        return max((eps_of(dtype) for dtypes in listed for dtype in dtypes.split(" and ") if dtype), default=0.0)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks with parts of the same parameters. Usually there is one group; a pipeline has one for each stage."""
        stages: list[tuple[set[int], set[str]]] = []
        for rank, record in enumerate(self.records[self.steps[0]]):
            ranks, names = {rank}, {entry.piece.name for entry in record.entries}
            for stage in [each for each in stages if each[1] & names]:
                stages.remove(stage)
                ranks, names = ranks | stage[0], names | stage[1]
            stages.append((ranks, names))
        return tuple(sorted(tuple(sorted(ranks)) for ranks, _ in stages))

    @cached_property
    def first_muon_step(self) -> int | None:
        """First step with an update by torch's Muon; None if there is no such update."""
        names = (
            (step, group.get("optimizer", ""))
            for step in self.steps
            for record in self.records[step]
            for group in record.settings
        )
        return next((step for step, name in names if name == "Muon"), None)

    def size(self, key: Key) -> float:
        """Return the size to which a tensor's tolerance is relative: its norm, plus a term for its number of elements.

        The second term is the norm that the tensor would have if its elements were as large as elements are on average at this
        point in training. A gradient's own norm is not enough, because the gradient may be zero apart from rounding. An example
        is a bias right before a normalization layer.
        """
        tensor = self.tensors[key]
        assert tensor.sketch.value is not None
        squares, numel = self.norms[key[:2]]
        return tensor.sketch.value.norm + math.sqrt(squares * tensor.numel / numel)

    def describe(self) -> str:
        """Return a text with folder, number of ranks and steps."""
        return f"{self.folder}, {count(len(self.ranks), 'rank')}, {steps_in_words(self.steps)}"


def read_run(folder: Path, name: str = "", steps: int | None = None) -> RecordedRun:
    """Read a folder from `record`, up to its first `steps` steps.

    Raises `UsageError` if the folder is not a trace, or if a rank's trace ends too early. Each rank's trace must contain `steps`
    steps, or all steps requested from `record`.
    """
    return run_of(folder, read_trace(folder), name, steps)


def run_of(folder: Path, ranks: tuple[RankTrace, ...], name: str = "", steps: int | None = None) -> RecordedRun:
    """Make a run from the contents of a folder's trace files, and add up each tensor over ranks.

    Raises `UsageError` under the same conditions as `read_run`.
    """
    records: dict[int, list[RecordedStep]] = {}
    for rank in ranks:
        for step in rank.steps:
            records.setdefault(step.step, []).append(step)
    complete = {number: tuple(found) for number, found in sorted(records.items()) if len(found) == len(ranks)}
    _require_steps(folder, ranks, len(complete), len(records), steps)
    complete = {number: complete[number] for number in list(complete)[:steps]}
    parts: dict[Key, list[tuple[int, Entry]]] = {}
    for number, found in complete.items():
        for rank_number, record in enumerate(found):
            for entry in record.entries:
                if entry.moment is not Moment.ACCUMULATED:
                    parts.setdefault((number, entry.moment, entry.piece.name), []).append((rank_number, entry))
    partial = frozenset(key for key, found in parts.items() if any(entry.addends == () for _, entry in found))
    rounded = {}
    for key in parts.keys() - partial if any(entry.model_dtype for found in parts.values() for _, entry in found) else ():
        of_model = [each for each in parts[key] if not each[1].model_dtype]
        if key[1] in (Moment.START, Moment.UPDATE) and 0 < len(of_model) < len(parts[key]):
            rounded[key] = _recorded(of_model)
            parts[key] = [each for each in parts[key] if each[1].model_dtype]
    tensors = {key: _recorded(found) for key, found in parts.items() if key not in partial}
    return RecordedRun(
        name=name or str(folder),
        folder=folder,
        ranks=ranks,
        steps=tuple(complete),
        records=complete,
        tensors=tensors,
        rounded=rounded,
        partial=partial,
    )


def _require_steps(folder: Path, ranks: Sequence[RankTrace], complete: int, begun: int, steps: int | None) -> None:
    if steps is not None and complete >= steps:
        return
    asked = ranks[0].header.num_steps
    cut_off = [str(rank.header.rank) for rank in ranks if rank.is_cut_off]
    if steps is not None:
        problem = f"you ask for {count(steps, 'step')}, and it has {complete}"
    elif cut_off:
        problem = f"the file of rank {', '.join(cut_off)} ends in the middle of a step, after {count(complete, 'complete step')}"
    elif complete < begun:
        problem = f"only some ranks have more than {count(complete, 'step')}"
    elif asked is not None and complete < asked:
        problem = f"it has {complete} of the {count(asked, 'step')} that `record` was asked for"
    elif not complete:
        problem = "it has no step"
    else:
        return
    remedy = f". To compare only the complete steps, use --steps {complete}" if complete else ""
    raise UsageError(f"folder {folder} is not valid: {problem}. Expected a run that was recorded to its end{remedy}.")


def _recorded(found: Sequence[tuple[int, Entry]]) -> RecordedTensor:
    ranks, entries = zip(*found, strict=True)
    if len(set(ranks)) < len(ranks):
        # If gradients are clipped twice in a step, the first reading counts.
        found = list({(rank, entry.piece, entry.model_dtype): (rank, entry) for rank, entry in reversed(found)}.values())[::-1]
        ranks, entries = zip(*found, strict=True)
    parts = [Part(rank=rank, piece=entry.piece, value=entry.sketch) for rank, entry in found]
    if any(entry.addends for entry in entries):
        parts = _with_sums(parts, entries)
    return RecordedTensor(ranks=ranks, entries=entries, sketch=assemble(parts))


def _with_sums(parts: Sequence[Part[Sketch]], entries: Sequence[Entry]) -> list[Part[Sketch]]:
    """Add up partial sums at the same position, and keep complete parts as they are."""
    found: dict[tuple[Piece, tuple[int, ...] | int], Part[Sketch]] = {}
    for part, entry in zip(parts, entries, strict=True):
        key = (part.piece, entry.addends or part.rank)
        found[key] = replace(found[key], value=found[key].value.overlaid(part.value)) if key in found else part
    return list(found.values())


def steps_in_words(steps: Sequence[int]) -> str:
    """Format step numbers: ``step 3``, ``steps 0 to 2`` or ``steps 1, 4``."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    is_range = list(steps) == list(range(steps[0], steps[-1] + 1))
    return f"steps {steps[0]} to {steps[-1]}" if is_range else f"steps {', '.join(map(str, steps))}"
