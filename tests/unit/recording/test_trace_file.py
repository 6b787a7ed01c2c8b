"""Trace files read back as they were written, keep the steps of a killed job, and are data only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.errors import UsageError
from equivcheck.recording.exact import hash_parts
from equivcheck.recording.sketch import EMPTY, sketch_parts
from equivcheck.recording.trace import Clip, Entry, Header, Moment, Output, RecordedStep
from equivcheck.recording.trace_file import TraceWriter, read_trace
from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece
from unit.recording.partitions import SHAPES, partitions

HEADER = Header(
    rank=0,
    num_ranks=1,
    argv=("train.py", "--lr", "0.1"),
    environment={"torch": "2.13.0"},
    num_steps=7,
    moved=2,
    notes=("a note",),
)


def entries_of(pieces: list[Piece], *, addends: tuple[int, ...] | None = None) -> tuple[Entry, ...]:
    """A tensor's parts, as a rank would record them."""
    parts = [
        (
            piece,
            torch.from_numpy(select_piece(np.arange(math.prod(piece.shape), dtype=np.float64).reshape(piece.shape), piece)),
        )
        for piece in pieces
    ]
    return tuple(
        Entry(moment=Moment.START, piece=piece, dtype="float64", sketch=sketch, exact=exact, addends=addends)
        for (piece, _), sketch, exact in zip(parts, sketch_parts(parts), hash_parts(parts), strict=True)
    )


def written(folder: Path, *steps: RecordedStep, header: Header = HEADER) -> Path:
    """A finished trace file, in place of an earlier one."""
    (folder / f"rank{header.rank}.ecr").unlink(missing_ok=True)
    writer = TraceWriter(folder, header)
    for step in steps:
        writer.write(step)
    writer.close()
    return folder / f"rank{header.rank}.ecr"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples."""
    return tmp_path_factory.mktemp("trace")


@given(st.data(), SHAPES, st.sampled_from([None, (), (0, 2)]))
def test_a_step_reads_back_to_the_bit(
    folder: Path, data: st.DataObject, shape: tuple[int, ...], addends: tuple[int, ...] | None
) -> None:
    """Positions, sums, hashes, losses that are not finite: everything."""
    entries = entries_of(data.draw(partitions(shape)), addends=addends)
    outputs = [
        Output(module="up", call=1, microbatch=1, shape=(3,), dtype=entry.dtype, sketch=entry.sketch) for entry in entries[:1]
    ]
    step = RecordedStep(
        step=3,
        losses=(0.1, math.inf),
        entries=tuple(replace(entry, microbatch=2, model_dtype="bfloat16") for entry in entries),
        samples=((1, 2**64 - 1), ()),
        num_backwards=2,
        clips=(Clip(norm=0.3, max_norm=math.inf, norm_type=3.0),),
        settings=({"optimizer": "SGD", "lr": "0.1"},),
        outputs=tuple(outputs),
        num_skipped=1,
    )
    file = written(folder, step)
    before = file.read_bytes()
    (trace,) = read_trace(folder)
    (found,) = trace.steps
    assert (trace.header, trace.is_cut_off) == (HEADER, False)
    for name in ("step", "losses", "samples", "num_backwards", "clips", "settings", "num_skipped"):
        assert getattr(found, name) == getattr(step, name)
    for one, other in zip([*found.entries, *found.outputs], [*step.entries, *step.outputs], strict=True):
        assert repr(replace(one, sketch=EMPTY)) == repr(replace(other, sketch=EMPTY))
        assert one.sketch.sums.tobytes() == other.sketch.sums.tobytes()
    assert written(folder, found).read_bytes() == before


def a_step(number: int) -> RecordedStep:
    """A step with one tensor."""
    return RecordedStep(step=number, losses=(0.5,), entries=entries_of([Piece(name="weight", shape=(70, 3))]))


def test_a_killed_job_keeps_its_steps(tmp_path: Path) -> None:
    """A last line that is cut off is left out, and the trace says so."""
    file = written(tmp_path, a_step(0), a_step(1))
    text = file.read_text()
    for length in range(len(text) - 1, text.index('{"step":1'), -97):
        file.write_text(text[:length])
        (trace,) = read_trace(tmp_path)
        assert [step.step for step in trace.steps] == [0]
        assert trace.is_cut_off


def test_each_step_is_in_the_file_at_once(tmp_path: Path) -> None:
    """Before the file is closed."""
    writer = TraceWriter(tmp_path, HEADER)
    for number in range(3):
        writer.write(a_step(number))
        (trace,) = read_trace(tmp_path)
        assert [step.step for step in trace.steps] == [*range(number + 1)]
    writer.close()


def test_a_tensor_takes_at_most_600_bytes(tmp_path: Path) -> None:
    """The number does not depend on its size."""
    long = Piece(name="model.layers.31.self_attn.q_proj.weight", shape=(400, 500), start=(100, 0), size=(100, 500))
    entries = tuple(
        Entry(moment=Moment.GRADIENT, piece=long, dtype="bfloat16", sketch=entry.sketch) for entry in entries_of([long]) * 100
    )
    sizes = [written(tmp_path, RecordedStep(step=0, losses=(), entries=kept)).stat().st_size for kept in (entries, ())]
    assert sizes[0] - sizes[1] <= 600 * len(entries)


def with_line(number: int, **changes: object) -> Callable[[str], str]:
    """A change of one line's fields; None removes the field."""

    def change(text: str) -> str:
        lines = text.split("\n")
        found = json.loads(lines[number]) | changes
        lines[number] = json.dumps({key: value for key, value in found.items() if value is not None})
        return "\n".join(lines)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda _: "", "its first line is not the header of a trace"),
        (lambda _: "[1]\n", "its first line is not the header of a trace"),
        (lambda text: "x" + text, "its first line is not the header of a trace"),
        (with_line(0, **{"equivcheck trace": 99}), "format version is 99"),
        (with_line(0, argv=None), "argv"),
        (with_line(0, environment=7), "AttributeError"),
        (with_line(1, entries=None), "entries"),
        (with_line(1, tensors=[{"dtype": "float32"}]), "name"),
        (with_line(1, tensors=[]), "IndexError"),
        (with_line(1, entries=[{"at": "start"}]), "tensors"),
        (with_line(1, entries=[{"at": "start", "tensors": [0], "sketches": ""}]), "0 numbers"),
        (with_line(1, losses="high"), "ValueError"),
        (with_line(0, num_ranks=2), "ranks 0 of 2"),
    ],
)
def test_a_file_that_is_no_trace_is_bad_input(tmp_path: Path, change: Callable[[str], str], named: str) -> None:
    """In one line that names the file or folder."""
    file = written(tmp_path, a_step(0))
    file.write_text(change(file.read_text()))
    with pytest.raises(UsageError, match=named) as raised:
        read_trace(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_traces_is_bad_input(tmp_path: Path) -> None:
    """It is named."""
    with pytest.raises(UsageError, match=str(tmp_path)):
        read_trace(tmp_path)
