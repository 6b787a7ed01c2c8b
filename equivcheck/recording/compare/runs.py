"""Recorded runs with each tensor added up over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from equivcheck.recording.assemble import Assembled, Part, assemble
from equivcheck.recording.sketch import Sketch
from equivcheck.recording.trace import Entry, Moment, RankTrace
from equivcheck.recording.trace_file import read_trace

Key = tuple[int, Moment, str]
"""Step, moment and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensor:
    """One tensor at one moment, over all ranks."""

    entries: tuple[Entry, ...]
    """Each rank's part."""
    sketch: Assembled[Sketch]
    """Sketch of the full tensor."""

    @property
    def numel(self) -> int:
        """Number of elements in the full tensor."""
        return math.prod(self.entries[0].piece.shape)

    @property
    def shapes(self) -> tuple[str, ...]:
        """Full shape; several if ranks disagree."""
        return tuple(dict.fromkeys(f"shape {entry.piece.shape}" for entry in self.entries))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element type; several if ranks disagree."""
        return tuple(dict.fromkeys(entry.dtype for entry in self.entries))

    @property
    def eps(self) -> float:
        """Machine epsilon for the dtype; 0 for integers."""
        dtype = getattr(torch, self.dtypes[0])
        return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether no rank has NaN or an infinite value."""
        return all(math.isfinite(value) for entry in self.entries for value in (entry.sketch.minimum, entry.sketch.maximum))

    @property
    def hash_anywhere(self) -> int | None:
        """Exact hash that ignores where the numbers are; None if it was not recorded."""
        parts = [Part(rank=0, piece=entry.piece, value=entry.exact) for entry in self.entries if entry.exact is not None]
        value = assemble(parts).value if parts else None
        return None if value is None else value.anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A recorded run."""

    ranks: tuple[RankTrace, ...]
    """Trace files."""
    steps: tuple[int, ...]
    """Steps that all ranks have recorded."""
    tensors: Mapping[Key, RecordedTensor]
    """Tensors, except those with partial placements."""
    partial: frozenset[Key]
    """Tensors with partial placements. They are not compared: a trace does not say which ranks' parts add up."""
    norms: Mapping[tuple[int, Moment], tuple[float, int]]
    """Sum over squares in all finite floating-point tensors at a moment, and number of elements in all tensors."""

    @property
    def moments(self) -> frozenset[tuple[int, Moment]]:
        """Steps and moments with at least one tensor."""
        return frozenset(self.norms)

    def loss(self, step: int) -> float:
        """Sum over all scalars on which `backward` was called in a step, averaged over ranks."""
        own = [loss for rank in self.ranks for each in rank.steps if each.step == step for loss in each.losses]
        return math.fsum(own) / len(self.ranks)


def read_run(folder: Path) -> RecordedRun:
    """Read a folder from `record`. Raises `UsageError` if it is not a trace."""
    ranks = read_trace(folder)
    everywhere = set[int].intersection(*({step.step for step in rank.steps} for rank in ranks))
    parts: dict[Key, list[tuple[int, Entry]]] = {}
    for rank in ranks:
        for step in rank.steps:
            for entry in step.entries if step.step in everywhere else ():
                parts.setdefault((step.step, entry.moment, entry.piece.name), []).append((rank.header.rank, entry))
    partial = frozenset(key for key, found in parts.items() if any(entry.is_partial for _, entry in found))
    tensors = {key: _recorded(found) for key, found in parts.items() if key not in partial}
    norms: dict[tuple[int, Moment], tuple[float, int]] = {}
    for (number, moment, _), tensor in tensors.items():
        squares, numel = norms.get((number, moment), (0.0, 0))
        value = tensor.sketch.value
        own = value.squares if value is not None and tensor.eps and tensor.is_finite else 0.0
        norms[number, moment] = squares + own, numel + tensor.numel
    return RecordedRun(ranks=ranks, steps=tuple(sorted(everywhere)), tensors=tensors, partial=partial, norms=norms)


def _recorded(found: Sequence[tuple[int, Entry]]) -> RecordedTensor:
    parts = [Part(rank=rank, piece=entry.piece, value=entry.sketch) for rank, entry in found]
    return RecordedTensor(entries=tuple(entry for _, entry in found), sketch=assemble(parts))
