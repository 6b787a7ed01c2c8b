"""Traces of a training that never ran: its values are drawn, and a test changes any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from equivcheck.recording.exact import hash_parts
from equivcheck.recording.sketch import Sketch, sketch_parts
from equivcheck.recording.trace import Clip, Entry, Header, Moment, Output, RecordedStep
from equivcheck.recording.trace_file import TraceWriter
from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece

SHAPES = {"up.weight": (8, 4), "up.bias": (8,), "q.weight": (4, 4), "k.weight": (4, 4), "norm.weight": (4,)}
"""Parameters."""
COLUMNS = {"up.weight": 0, "up.bias": 0, "q.weight": 1, "k.weight": 1}
"""Dims that tensor parallelism splits."""
SAMPLES = 8
"""Samples in each step."""
Values = npt.NDArray[np.float32]


class Place(NamedTuple):
    """A tensor on a rank."""

    step: int
    moment: Moment
    name: str
    rank: int


Change = Callable[[Place, Values], Values | None]
Edit = Callable[[int, RecordedStep], RecordedStep]


def same(_place: Place, values: Values) -> Values | None:
    """No change."""
    return values


def as_recorded(_rank: int, step: RecordedStep) -> RecordedStep:
    """No change."""
    return step


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to write."""

    ranks: int = 1
    steps: int = 2
    layout: str = "replicas"
    """``replicas``, ``rows`` (as FSDP2), ``columns`` (as tensor parallelism) or ``stages`` (as a pipeline)."""
    moved: int = 0
    asked: int | None = None
    change: Change = same
    """Changes a full tensor on a rank; None leaves it out."""
    edit: Edit = as_recorded
    """Changes a rank's step before it is written."""
    notes: tuple[tuple[str, ...], ...] = ()
    """Each rank's clauses about names and positions; none if empty."""

    def write(self, folder: Path) -> Path:
        """Write all ranks' files."""
        for rank in range(self.ranks):
            environment = {"torch": "2.13.0"}
            header = Header(
                rank=rank,
                num_ranks=self.ranks,
                argv=("train.py",),
                environment=environment,
                num_steps=self.asked,
                moved=self.moved,
                notes=self.notes[rank] if self.notes else (),
            )
            writer = TraceWriter(folder, header)
            for step in range(self.steps):
                writer.write(self.edit(rank, self._step(step, rank)))
            writer.close()
        return folder

    def _step(self, step: int, rank: int) -> RecordedStep:
        moments = [Moment.START] * (step == 0) + [Moment.UNCLIPPED, Moment.GRADIENT, Moment.UPDATE]
        moments += [Moment.STATE, Moment.BUFFER] * (step == self.steps - 1)
        samples = self._samples(step, rank)
        has_loss = self.layout != "stages" or rank == self.ranks - 1
        return RecordedStep(
            step=step,
            losses=(0.3 + step, 0.5 + step) if has_loss else (),
            entries=tuple(entry for moment in moments for entry in self._entries(step, moment, rank)),
            samples=samples,
            num_backwards=2,
            clips=(Clip(norm=2.5 + step, max_norm=1.0),),
            settings=({"optimizer": "AdamW", "lr": "0.01", "foreach": "None"},),
            outputs=tuple(
                output_of(module, microbatch, own) for module in ("up", "down") for microbatch, own in enumerate(samples)
            ),
        )

    def _samples(self, step: int, rank: int) -> tuple[tuple[int, ...], ...]:
        """Two microbatches. Only data-parallel ranks have samples of their own; only a pipeline's first stage has any."""
        own = range(100 * step, 100 * step + SAMPLES)
        if self.layout == "stages" and rank:
            return ()
        if self.layout in {"replicas", "rows"}:
            own = own[rank :: self.ranks]
        return tuple(own[::2]), tuple(own[1::2])

    def _entries(self, step: int, moment: Moment, rank: int) -> list[Entry]:
        parts = []
        for number, (name, shape) in enumerate(SHAPES.items()):
            if self.layout == "stages" and number % self.ranks != rank:
                continue
            full = draw(step, moment, name)
            if self.moved:
                full = full * (1 + np.float32(2**-23) * np.sign(draw(self.moved, moment, name)))
            changed = self.change(Place(step, moment, name, rank), full)
            if changed is not None:
                piece = self._piece(f"{name}/exp_avg" if moment is Moment.STATE else name, shape, rank)
                parts.append((piece, torch.from_numpy(select_piece(changed.astype(np.float32), piece).copy())))
        hashes = hash_parts(parts) if moment in {Moment.START, Moment.BUFFER} else [None] * len(parts)
        return [
            Entry(moment=moment, piece=piece, dtype="float32", sketch=sketch, exact=exact)
            for (piece, _), sketch, exact in zip(parts, sketch_parts(parts), hashes, strict=True)
        ]

    def _piece(self, name: str, shape: tuple[int, ...], rank: int) -> Piece:
        dim = {"rows": 0, "columns": COLUMNS.get(name.partition("/")[0])}.get(self.layout)
        if dim is None:
            return Piece(name=name, shape=shape)
        size = shape[dim] // self.ranks
        start = tuple(rank * size if axis == dim else 0 for axis in range(len(shape)))
        return Piece(name=name, shape=shape, start=start, size=tuple(size if axis == dim else n for axis, n in enumerate(shape)))


def draw(step: int, moment: Moment, name: str) -> Values:
    """A tensor's values."""
    seed = (step, list(Moment).index(moment), list(SHAPES).index(name))
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(np.float32)


def output_of(module: str, microbatch: int, samples: tuple[int, ...], scale: float = 1.0) -> Output:
    """A module's output: each sample has its own values, and the sketch is their sum."""
    values = [np.random.default_rng((sample, len(module))).standard_normal(32) * scale for sample in samples]
    sums = np.sum(values, axis=0) if values else np.zeros(32)
    sketch = Sketch(sums=sums, squares=float(sum((each**2).sum() for each in values)), minimum=-9.0, maximum=9.0)
    return Output(module=module, call=0, microbatch=microbatch, shape=(5,), dtype="float32", sketch=sketch)


def without(moment: Moment, rank: int | None = None) -> Edit:
    """Drop a moment from a trace, on all ranks or on one."""

    def edit(own: int, step: RecordedStep) -> RecordedStep:
        if rank not in {None, own}:
            return step
        return replace(step, entries=tuple(entry for entry in step.entries if entry.moment is not moment))

    return edit


def scaled(
    factor: float, *moments: Moment, names: tuple[str, ...] = tuple(SHAPES), step: int = 0, rank: int | None = None
) -> Change:
    """Multiply tensors from a step on."""

    def change(place: Place, values: Values) -> Values:
        is_hit = place.step >= step and place.moment in moments and place.name in names and rank in {None, place.rank}
        return values * np.float32(factor) if is_hit else values

    return change
