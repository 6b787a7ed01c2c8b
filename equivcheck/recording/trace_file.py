"""Trace files: one for each rank, with one JSON line for each step.

A step is written at once, so a killed job keeps its earlier steps. Reading a file runs no code from it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from equivcheck.errors import UsageError
from equivcheck.recording.exact import ExactHash
from equivcheck.recording.sketch import FORMAT_VERSION, Sketch
from equivcheck.system.choice import PrintableEnum
from equivcheck.worlds.trace.trace import Piece

SUFFIX = ".ecr"
"""Suffix; trace files are called ``rank0.ecr`` and so on."""


class Moment(PrintableEnum):
    """When a tensor was read. Gradients are those that the optimizer finds."""

    START = "start"
    UNCLIPPED = "gradient before clipping"
    GRADIENT = "gradient"
    UPDATE = "parameter"
    STATE = "state"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Facts about a recorded process."""

    rank: int
    """Rank, from 0."""
    num_ranks: int
    """Number of ranks."""
    argv: tuple[str, ...]
    """Command line."""
    environment: Mapping[str, str]
    """Settings that may change values, such as torch's version and ``OMP_NUM_THREADS``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One rank's part in one tensor at one moment."""

    moment: Moment
    """When it was read."""
    piece: Piece
    """Name and position in the full tensor."""
    dtype: str
    """Element type, such as ``float32``."""
    sketch: Sketch
    """The part's sketch."""
    exact: ExactHash | None = None
    """Exact hash; None unless initial values or buffers."""
    is_partial: bool = False
    """Whether the tensor is the sum over ranks, as with DTensor's `Partial`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """One step, as a rank recorded it."""

    step: int
    """Number of earlier updates."""
    losses: tuple[float, ...]
    """Scalars that `backward` was called on, in order."""
    entries: tuple[Entry, ...]
    """Tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One trace file."""

    header: Header
    """Facts about the process."""
    steps: tuple[RecordedStep, ...]
    """Steps in order."""
    is_cut_off: bool
    """Whether the last line is incomplete, because the process was killed while it wrote."""


class TraceWriter:
    """Writes a rank's trace file. Raises `OSError` if the file cannot be written."""

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / f"rank{header.rank}{SUFFIX}").open("w", encoding="utf-8")
        own = {
            "rank": header.rank,
            "num_ranks": header.num_ranks,
            "argv": header.argv,
            "environment": header.environment,
        }
        self._write({"equivcheck trace": FORMAT_VERSION, **own})

    def write(self, step: RecordedStep) -> None:
        """Append a step."""
        entries = [_entry_object(entry) for entry in step.entries]
        self._write({"step": step.step, "losses": step.losses, "entries": entries})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _entry_object(entry: Entry) -> dict[str, Any]:
    piece, sketch = entry.piece, entry.sketch
    numbers = np.array([sketch.squares, sketch.minimum, sketch.maximum, *sketch.sums], dtype="<f8")
    found: dict[str, Any] = {"at": entry.moment.value, "name": piece.name, "shape": piece.shape, "dtype": entry.dtype}
    found |= {"start": piece.start, "size": piece.size} if piece.start else {}
    found |= {"run": piece.run} if piece.run is not None else {}
    found |= {"partial": True} if entry.is_partial else {}
    found |= {"exact": [entry.exact.in_place, entry.exact.anywhere]} if entry.exact is not None else {}
    return found | {"sketch": base64.b64encode(numbers.tobytes()).decode()}


def read_trace(folder: Path) -> tuple[RankTrace, ...]:
    """Read all trace files in a folder, in rank order. Raises `UsageError` if there is none, or one is not valid."""
    files = sorted(folder.glob(f"rank*{SUFFIX}"))
    if not files:
        raise UsageError(
            f"folder {folder} is not valid: it has no file rank0{SUFFIX}. Expected a folder from `equivcheck.record(folder)`, which "
            "writes files only if an optimizer of torch makes a step."
        )
    found = sorted((_read_file(file) for file in files), key=lambda trace: trace.header.rank)
    ranks = [trace.header.rank for trace in found]
    if ranks != list(range(found[0].header.num_ranks)):
        raise UsageError(
            f"folder {folder} is not valid: it has ranks {', '.join(map(str, ranks))} of {found[0].header.num_ranks}. "
            "Expected one file from each rank of one job."
        )
    return tuple(found)


def _read_file(file: Path) -> RankTrace:
    try:
        first, *lines = file.read_text(encoding="utf-8").split("\n")
        header = json.loads(first)
        version = header["equivcheck trace"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"file {file} is not valid: it does not begin as a trace does ({error}). Expected a trace file."
        ) from error
    if version != FORMAT_VERSION:
        raise UsageError(
            f"file {file} is not valid: its format version is {version}. Expected {FORMAT_VERSION}: record it again, or read it "
            "with the equivcheck that recorded it."
        )
    is_cut_off = bool(lines.pop()) if lines else True  # a complete line ends with a line break
    try:
        steps = _joined([_step(json.loads(line)) for line in lines])
        own = Header(
            rank=int(header["rank"]),
            num_ranks=int(header["num_ranks"]),
            argv=tuple(map(str, header["argv"])),
            environment={str(name): str(value) for name, value in header["environment"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"file {file} is not valid: {type(error).__name__} ({error}). Expected a trace file.") from error
    return RankTrace(header=own, steps=steps, is_cut_off=is_cut_off)


def _joined(steps: Sequence[RecordedStep]) -> tuple[RecordedStep, ...]:
    """Steps with their lines joined. If a tensor is read at the end only, it is in the last step's second line."""
    found: dict[int, RecordedStep] = {}
    for each in steps:
        before = found.get(each.step, RecordedStep(step=each.step, losses=(), entries=()))
        found[each.step] = RecordedStep(
            step=each.step,
            losses=before.losses + each.losses,
            entries=before.entries + each.entries,
        )
    return tuple(found.values())


def _step(line: Mapping[str, Any]) -> RecordedStep:
    return RecordedStep(
        step=int(line["step"]),
        losses=tuple(map(float, line["losses"])),
        entries=tuple(map(_entry, line["entries"])),
    )


def _entry(found: Mapping[str, Any]) -> Entry:
    numbers = np.frombuffer(base64.b64decode(found["sketch"], validate=True), dtype="<f8")
    squares, minimum, maximum = map(float, numbers[:3])
    piece = Piece(
        name=str(found["name"]),
        shape=_ints(found["shape"]),
        start=_ints(found.get("start", ())),
        size=_ints(found.get("size", ())),
        run=_pair(found["run"]) if "run" in found else None,
    )
    return Entry(
        moment=Moment(found["at"]),
        piece=piece,
        dtype=str(found["dtype"]),
        sketch=Sketch(sums=numbers[3:], squares=squares, minimum=minimum, maximum=maximum),
        exact=None
        if "exact" not in found
        else ExactHash(**dict(zip(("in_place", "anywhere"), _pair(found["exact"]), strict=True))),
        is_partial=bool(found.get("partial", False)),
    )


def _exact(values: Sequence[Any]) -> ExactHash:
    in_place, anywhere = _pair(values)
    return ExactHash(in_place=in_place, anywhere=anywhere)


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))


def _pair(values: Sequence[Any]) -> tuple[int, int]:
    one, other = map(int, values)
    return one, other
