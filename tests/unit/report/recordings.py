"""Recorded runs of a small training, written without training anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from equivcheck.recording.compare.compare import compare_everything
from equivcheck.recording.exact import hash_parts
from equivcheck.recording.sketch import sketch_parts
from equivcheck.recording.trace import Clip, Entry, Header, Moment, RecordedStep
from equivcheck.recording.trace_file import TraceWriter
from equivcheck.report.recording_page.page import write_page
from equivcheck.worlds.trace.trace import Piece

TENSORS = {"up.weight": (4, 3), "up.bias": (4,), "down.<weight>": (2, 4)}
"""Shapes by name, in the model's order."""


def write_run(  # noqa: PLR0913 - one for each property
    folder: Path, *, ranks: int = 1, fault: str = "", steps: int = 3, num_tensors: int = 3, moved: int = 0, since: int = 1
) -> Path:
    """Write a run with replicas on all ranks. The fault begins at step `since`. A moved run has no noise."""
    for rank in range(ranks):
        environment = {"torch": "2.13.0", **({"OMP_NUM_THREADS": "8"} if fault == "environment" else {})}
        argv = ("train.py", f"--ranks={ranks}")
        header = Header(rank=rank, num_ranks=ranks, argv=argv, environment=environment, moved=moved)
        writer = TraceWriter(folder, header)
        for step in range(steps):
            writer.write(_step(step, rank, ranks, fault if step >= since else "", num_tensors))
        writer.close()
    return folder


def _step(step: int, rank: int, ranks: int, fault: str, num_tensors: int) -> RecordedStep:
    moments = [Moment.START] if step == 0 else []
    moments += [Moment.UNCLIPPED, Moment.GRADIENT, Moment.UPDATE]
    names = [*(f"more.{number}" for number in range(num_tensors - len(TENSORS))), *TENSORS]
    samples = range(100 * step, 100 * step + 8)[rank :: 1 if fault == "samples" else ranks]
    return RecordedStep(
        step=step,
        losses=(0.5,),
        entries=tuple(entry for moment in moments for entry in _entries(moment, names, step, rank, fault)),
        samples=tuple(tuple(samples)[at::2] for at in range(2)) if fault != "samples" else (tuple(samples), (1, 2)),
        num_backwards=2,
        clips=(Clip(norm=1.0, max_norm=0.1),),
        settings=({"optimizer": "AdamW", "lr": "0.02" if fault == "setting" else "0.01"},),
    )


def _entries(moment: Moment, names: list[str], step: int, rank: int, fault: str) -> list[Entry]:
    parts = []
    for number, name in enumerate(names):
        shape = TENSORS.get(name, (2,))
        numbers = np.random.default_rng((step, number, len(moment.value))).standard_normal(shape)
        if name == "up.bias" and moment is Moment.GRADIENT and fault == "gradient":
            numbers *= 2.0
        if name == "up.bias" and moment is Moment.UPDATE and fault == "replica" and rank == 1:
            numbers[0] += 1.0
        if name == "up.bias" and moment is Moment.UPDATE and fault == "nan":
            numbers[0] = np.nan
        if name == "up.bias" and moment is Moment.GRADIENT and fault == "missing":
            continue
        parts.append((Piece(name=name, shape=shape), torch.from_numpy(numbers)))
    is_exact = moment is Moment.START
    exact = hash_parts(parts) if is_exact else [None] * len(parts)
    return [
        Entry(moment=moment, piece=piece, dtype="float64", sketch=sketch, exact=hashed)
        for (piece, _), sketch, hashed in zip(parts, sketch_parts(parts), exact, strict=True)
    ]


def write_compared(  # noqa: PLR0913 - one for each property
    file: Path, fault: str = "", *, ranks: int = 2, steps: tuple[int, int] = (3, 3), num_tensors: int = 3, since: int = 1
) -> None:
    """Write the page about a run on one rank and a run with a fault on two."""
    folder = file.with_suffix(".runs")
    one = write_run(folder / "one", steps=steps[0], num_tensors=num_tensors)
    other = write_run(folder / "other", ranks=ranks, fault=fault, steps=steps[1], num_tensors=num_tensors, since=since)
    moved = write_run(folder / "moved", steps=steps[0], num_tensors=num_tensors, moved=1)
    write_page(file, compare_everything(one, other, moved=[moved]))
