"""Trace files: one for each rank, with one JSON line for each step.

A step is written at once, so a killed job keeps its earlier steps. Reading a file runs no code from it. Names and positions are
written once; steps refer to them by number.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from equivcheck.errors import UsageError
from equivcheck.recording.exact import ExactHash
from equivcheck.recording.signs import NUM_SUMS
from equivcheck.recording.sketch import FORMAT_VERSION, Sketch, sketches_in
from equivcheck.recording.trace import Clip, Entry, Header, Moment, Output, RankTrace, RecordedStep
from equivcheck.worlds.trace.trace import Piece

SUFFIX = ".ecr"
"""Suffix; trace files are called ``rank0.ecr`` and so on."""
_Tensor = tuple[Piece, str, tuple[int, ...] | None, str]
"""Position, element type, ranks with partial sums, and the model's element type: written once, and referred to by number."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """Objects that trace files share. Replicas have the same values, so each value is decoded and compared once."""

    tensors: dict[str, _Tensor] = field(default_factory=dict)
    """Decoded tensors, by their JSON text."""
    entries: dict[tuple[object, ...], tuple[Entry, ...]] = field(default_factory=dict)
    """Entries by their encoded values and by the ids of their tensors."""


class TraceWriter:
    """Writes one rank's trace file. Raises `OSError` if the file cannot be written, and `UsageError` if it already exists.

    Only ranks that torchrun has restarted replace an existing file.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank{header.rank}{SUFFIX}"
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        try:
            # Without a buffer, so that an error does not come again when the file is closed.
            self._file = file.open("wb" if is_restart else "xb", buffering=0)
        except FileExistsError:
            raise UsageError(f"file {file} is not valid: it already exists. Expected a new folder for each run.") from None
        self._numbers: dict[_Tensor, int] = {}
        self._write({"equivcheck trace": FORMAT_VERSION, **asdict(header)})

    def write(self, step: RecordedStep) -> None:
        """Append the record of one step to the file."""
        num_known = len(self._numbers)
        for entry in step.entries:
            self._numbers.setdefault(_identity(entry), len(self._numbers))
        self._write(
            {
                "step": step.step,
                "losses": step.losses,
                "samples": [[f"{sample:x}" for sample in microbatch] for microbatch in step.samples],
                "backwards": step.num_backwards,
                "clips": [asdict(clip) for clip in step.clips],
                "skipped": step.num_skipped,
                "settings": [dict(each) for each in step.settings],
                "outputs": [_output_object(output) for output in step.outputs],
                "tensors": list(map(_tensor_object, islice(self._numbers, num_known, None))),
                "entries": [
                    self._group_object(moment, microbatch, list(entries))
                    for (moment, microbatch, _), entries in groupby(
                        step.entries, lambda entry: (entry.moment, entry.microbatch, entry.exact is None)
                    )
                ],
            }
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        left = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        while left:
            left = left[self._file.write(left) :]

    def _group_object(self, moment: Moment, microbatch: int, entries: Sequence[Entry]) -> dict[str, Any]:
        found: dict[str, Any] = {"at": moment.value, "tensors": [self._numbers[_identity(entry)] for entry in entries]}
        found |= {"microbatch": microbatch} if microbatch else {}
        exact = [[entry.exact.in_place, entry.exact.anywhere] for entry in entries if entry.exact is not None]
        found |= {"exact": exact} if exact else {}
        return found | {"sketches": _encoded([entry.sketch for entry in entries])}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _identity(entry: Entry) -> _Tensor:
    return entry.piece, entry.dtype, entry.addends, entry.model_dtype


def _tensor_object(tensor: _Tensor) -> dict[str, Any]:
    piece, dtype, addends, model_dtype = tensor
    found: dict[str, Any] = {"name": piece.name, "shape": piece.shape, "dtype": dtype}
    found |= {"start": piece.start, "size": piece.size} if piece.start else {}
    found |= {"run": piece.run} if piece.run is not None else {}
    found |= {"addends": addends} if addends is not None else {}
    return found | ({"model_dtype": model_dtype} if model_dtype else {})


def _output_object(output: Output) -> dict[str, Any]:
    fields = ("module", "call", "microbatch", "shape", "dtype")
    return {name: getattr(output, name) for name in fields} | {"sketch": _encoded([output.sketch])}


def _encoded(sketches: Sequence[Sketch]) -> str:
    numbers = np.empty((len(sketches), NUM_SUMS + 3), dtype="<f8")
    for row, sketch in zip(numbers, sketches, strict=True):
        row[:3], row[3:] = (sketch.squares, sketch.minimum, sketch.maximum), sketch.sums
    return base64.b64encode(numbers.tobytes()).decode()


def _decoded(text: str, count: int) -> list[Sketch]:
    numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f8")
    if len(numbers) != count * (NUM_SUMS + 3):
        raise ValueError(f"expected {count * (NUM_SUMS + 3)} numbers for {count} sketches, but found {len(numbers)} numbers")
    return sketches_in(numbers.reshape(count, NUM_SUMS + 3))


def read_trace(folder: Path) -> tuple[RankTrace, ...]:
    """Read all trace files in a folder, in rank order.

    Raises `UsageError` if the folder has no trace file, if a rank's file is missing, or if a file is not valid.
    """
    files = sorted(folder.glob(f"rank*{SUFFIX}"))
    if not files:
        raise UsageError(
            f"folder {folder} is not valid: it has no file rank0{SUFFIX}. Expected a folder from `equivcheck.record`. "
            "If it is one, nothing was recorded, and `record` printed the reason on stderr."
        )
    known = _Known()
    found = sorted((_read_file(file, known) for file in files), key=lambda trace: trace.header.rank)
    ranks = [trace.header.rank for trace in found]
    if ranks != list(range(found[0].header.num_ranks)):
        raise UsageError(
            f"folder {folder} is not valid: it has ranks {', '.join(map(str, ranks))} of {found[0].header.num_ranks}. "
            "Expected one file from each rank of one job."
        )
    return tuple(found)


def _read_file(file: Path, known: _Known) -> RankTrace:
    try:
        first, *lines = file.read_text(encoding="utf-8").split("\n")
        header = json.loads(first)
        version = header["equivcheck trace"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"file {file} is not valid: its first line is not the header of a trace ({error}). Expected a file that `record` "
            f"wrote."
        ) from error
    if version != FORMAT_VERSION:
        raise UsageError(
            f"file {file} is not valid: its format version is {version}. Expected {FORMAT_VERSION}: record it again, or read it "
            "with the equivcheck that recorded it."
        )
    is_cut_off = bool(lines.pop()) if lines else True  # a complete line ends with a line break
    try:
        tensors: list[_Tensor] = []
        steps = _joined([_step(json.loads(line), tensors, known) for line in lines])
        own = Header(
            rank=int(header["rank"]),
            num_ranks=int(header["num_ranks"]),
            argv=tuple(map(str, header["argv"])),
            environment={str(name): str(value) for name, value in header["environment"].items()},
            num_steps=None if header["num_steps"] is None else int(header["num_steps"]),
            moved=int(header["moved"]),
            notes=tuple(map(str, header["notes"])),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"file {file} is not valid: a line cannot be read ({type(error).__name__}: {error}). Expected a file that `record` "
            f"wrote."
        ) from error
    return RankTrace(header=own, steps=steps, is_cut_off=is_cut_off)


def _joined(steps: Sequence[RecordedStep]) -> tuple[RecordedStep, ...]:
    """Return steps with their lines joined. If a tensor is read at the end only, it is in the last step's second line."""
    found: dict[int, RecordedStep] = {}
    for each in steps:
        before = found.get(each.step)
        found[each.step] = (
            each
            if before is None
            else replace(before, entries=before.entries + each.entries, num_backwards_after=each.num_backwards)
        )
    return tuple(found.values())


def _step(line: Mapping[str, Any], tensors: list[_Tensor], known: _Known) -> RecordedStep:
    """Read one line of a trace file. Tensors that the line names for the first time are added to `tensors`."""
    tensors += [known.tensors.setdefault(json.dumps(each), _tensor(each)) for each in line["tensors"]]
    return RecordedStep(
        step=int(line["step"]),
        losses=tuple(map(float, line["losses"])),
        entries=tuple(entry for group in line["entries"] for entry in _entries(group, tensors, known)),
        samples=tuple(tuple(int(sample, 16) for sample in microbatch) for microbatch in line["samples"]),
        num_backwards=int(line["backwards"]),
        clips=tuple(Clip(**{name: float(value) for name, value in clip.items()}) for clip in line["clips"]),
        num_skipped=int(line["skipped"]),
        settings=tuple({str(name): str(value) for name, value in each.items()} for each in line["settings"]),
        outputs=tuple(map(_output, line["outputs"])),
    )


def _output(found: Mapping[str, Any]) -> Output:
    return Output(
        module=str(found["module"]),
        call=int(found["call"]),
        microbatch=int(found["microbatch"]),
        shape=_ints(found["shape"]),
        dtype=str(found["dtype"]),
        sketch=_decoded(found["sketch"], 1)[0],
    )


def _tensor(found: Mapping[str, Any]) -> _Tensor:
    piece = Piece(
        name=str(found["name"]),
        shape=_ints(found["shape"]),
        start=_ints(found.get("start", ())),
        size=_ints(found.get("size", ())),
        run=_pair(found["run"]) if "run" in found else None,
    )
    addends = _ints(found["addends"]) if "addends" in found else None
    return piece, str(found["dtype"]), addends, str(found.get("model_dtype", ""))


def _entries(group: Mapping[str, Any], tensors: Sequence[_Tensor], known: _Known) -> tuple[Entry, ...]:
    """Return the entries for one point in a step.

    `tensors` are all tensors named so far. Ranks with the same values share entries.
    """
    own, exact = [tensors[number] for number in group["tensors"]], group.get("exact")
    microbatch = int(group.get("microbatch", 0))
    key = (group["at"], microbatch, group["sketches"], None if exact is None else str(exact), *map(id, own))
    if key not in known.entries:
        known.entries[key] = tuple(_decoded_entries(Moment(group["at"]), microbatch, own, group["sketches"], exact))
    return known.entries[key]


def _decoded_entries(
    moment: Moment, microbatch: int, tensors: Sequence[_Tensor], text: str, exact: Sequence[Any] | None
) -> Iterator[Entry]:
    hashes = [None] * len(tensors) if exact is None else [_exact(each) for each in exact]
    for tensor, sketch, own in zip(tensors, _decoded(text, len(tensors)), hashes, strict=True):
        piece, dtype, addends, model_dtype = tensor
        yield Entry(
            moment=moment,
            piece=piece,
            dtype=dtype,
            sketch=sketch,
            exact=own,
            addends=addends,
            microbatch=microbatch,
            model_dtype=model_dtype,
        )


def _exact(values: Sequence[Any]) -> ExactHash:
    in_place, anywhere = _pair(values)
    return ExactHash(in_place=in_place, anywhere=anywhere)


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))


def _pair(values: Sequence[Any]) -> tuple[int, int]:
    one, other = map(int, values)
    return one, other
