"""The record of the current step, while the training runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate

from equivcheck.recording.tensors import local_of
from equivcheck.recording.trace import Clip, Entry, Moment, Output, RecordedStep
from equivcheck.recording.watch.microbatches import Call


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """The record of the current step. Losses, norms and hashes stay on their devices until the step ends."""

    entries: list[Entry] = field(default_factory=list)
    """Sketches of tensors, except accumulated gradients."""
    accumulated: dict[int, list[Entry]] = field(default_factory=dict)
    """Sketches of the gradients before each backward pass. Keys say how many backward passes the step had before."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Scalars on which `backward` was called."""
    clips: list[tuple[Any, float, float]] = field(default_factory=list)
    """Norm, maximum norm and norm type for each call to a clipping function."""
    settings: list[Mapping[str, str]] = field(default_factory=list)
    """Settings of each parameter group when its optimizer stepped."""
    num_skipped: int = 0
    """How many updates a `GradScaler` skipped."""

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename the tensors in all entries. `names` maps earlier names to current names."""
        for entries in (self.entries, *self.accumulated.values()):
            entries[:] = [rename_entry(entry, names) for entry in entries]

    def to_recorded_step(self, step: int, microbatches: Sequence[Sequence[Call]], num_backwards: int) -> RecordedStep:
        """Return the record as it is written to the trace, with all values copied from their devices."""
        # If a GradScaler finds infinite gradients, no optimizer gets them.
        entries = [each for each in self.entries if not (self.num_skipped and _is_infinite_gradient(each))]
        # Readings before a pass that only repeated the last microbatch belong to no microbatch.
        accumulated = [found for number, found in self.accumulated.items() if number < num_backwards]
        return RecordedStep(
            step=step,
            losses=tuple(float(local_of(loss)) for loss in self.losses),
            entries=(*(entry for found in accumulated for entry in found), *entries),
            samples=tuple(tuple(_samples(calls)) for calls in microbatches),
            num_backwards=num_backwards,
            clips=tuple(Clip(norm=_norm(norm), max_norm=most, norm_type=kind) for norm, most, kind in self.clips),
            settings=tuple(self.settings),
            outputs=tuple(output for number, calls in enumerate(microbatches) for output in _outputs(number, calls)),
            num_skipped=self.num_skipped,
        )


def rename_entry(entry: Entry, names: Mapping[str, str]) -> Entry:
    """Return an entry with the tensor's current name. `names` maps earlier names to current names."""
    name = names.get(entry.piece.name, entry.piece.name)
    return replace(entry, piece=replace(entry.piece, name=name))


def _is_infinite_gradient(entry: Entry) -> bool:
    is_gradient = entry.moment in (Moment.UNCLIPPED, Moment.GRADIENT)
    return is_gradient and not (math.isfinite(entry.sketch.minimum) and math.isfinite(entry.sketch.maximum))


def _samples(calls: Sequence[Call]) -> Iterator[int]:
    for call in calls:
        assert call.hashes is not None, "microbatches have calls with samples only"
        yield from call.hashes.cpu().numpy().astype(np.uint64).tolist()


def _norm(norm: Any) -> float:
    """Return a norm as a number; NaN if ranks hold parts of the norm, because adding up these parts would communicate."""
    if isinstance(norm, DTensor) and not all(isinstance(placement, Replicate) for placement in norm.placements):
        return math.nan
    return float(local_of(norm) if isinstance(norm, torch.Tensor) else norm)


def _outputs(microbatch: int, calls: Sequence[Call]) -> Iterator[Output]:
    earlier: Counter[str] = Counter()
    for call in calls:
        assert call.hashes is not None, "microbatches have calls with samples only"
        for name, shape, dtype, sketch in call.outputs.sign_rows(call.hashes):
            yield Output(module=name, call=earlier[name], microbatch=microbatch, shape=shape, dtype=dtype, sketch=sketch)
            earlier[name] += 1
