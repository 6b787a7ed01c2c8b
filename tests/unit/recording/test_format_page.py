"""The page about the trace format names every field, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from equivcheck.recording.exact import ExactHash
from equivcheck.recording.signs import NUM_SUMS, VECTOR_WIDTH
from equivcheck.recording.sketch import FORMAT_VERSION, Sketch
from equivcheck.recording.trace import Clip, Entry, Header, Moment, Output, RecordedStep
from equivcheck.recording.trace_file import TraceWriter
from equivcheck.worlds.trace.trace import Piece

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "trace_format.md").read_text("utf-8")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Header and step in a file that has every field."""
    folder = tmp_path_factory.mktemp("trace")
    sketch = Sketch(sums=np.zeros(NUM_SUMS), squares=0.0, minimum=0.0, maximum=0.0)
    entry = Entry(
        moment=Moment.ACCUMULATED,
        piece=Piece(name="weight", shape=(4, 3), start=(1, 0), size=(2, 3), run=(1, 2)),
        dtype="float32",
        sketch=sketch,
        exact=ExactHash(in_place=1, anywhere=2),
        addends=(0, 1),
        microbatch=1,
        model_dtype="bfloat16",
    )
    output = Output(module="up", call=0, microbatch=0, shape=(3,), dtype="float32", sketch=sketch)
    step = RecordedStep(step=0, losses=(0.5,), entries=(entry,), clips=(Clip(norm=1.0, max_norm=0.1),), outputs=(output,))
    writer = TraceWriter(folder, Header(rank=0, num_ranks=1, argv=(), environment={}))
    writer.write(step)
    writer.close()
    return list(map(json.loads, (folder / "rank0.ecr").read_text("utf-8").splitlines()))


def described(section: str) -> Iterator[str]:
    """Fields in the first column of a section's table."""
    text = re.split(r"^#+ ", PAGE.partition(f" {section}\n")[2], flags=re.MULTILINE)[0]
    for line in text.splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split("|")[1])


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("Header", (0,)),
        ("Step", (1,)),
        ("Tensors", (1, "tensors", 0)),
        ("Entries", (1, "entries", 0)),
        ("Module outputs", (1, "outputs", 0)),
    ],
)
def test_each_field_is_described(lines: list[dict[str, object]], section: str, path: tuple[int | str, ...]) -> None:
    """In the section about its object."""
    found: object = lines
    for key in path:
        found = found[key]  # type: ignore[index]
    assert isinstance(found, dict)
    assert sorted(described(section)) == sorted(found)


def test_each_moment_with_tensors_and_each_field_of_a_clip_is_named() -> None:
    """As it is written."""
    row = next(line for line in PAGE.splitlines() if line.startswith("| `at`"))
    without_tensors = {Moment.SAMPLES, Moment.OUTPUT, Moment.LOSS, Moment.NORM}
    assert re.findall(r"`([^`]+)`", row)[1:] == [moment.value for moment in Moment if moment not in without_tensors]
    row = next(line for line in PAGE.splitlines() if line.startswith("| `clips`"))
    assert re.findall(r"`([^`]+)`", row)[1:] == [field.name for field in fields(Clip)]


def test_the_numbers_of_the_format_are_named() -> None:
    """Version, sums in a sketch, and width of a vector's rows."""
    assert f"version of the format: {FORMAT_VERSION} |" in PAGE
    assert f"A sketch is {NUM_SUMS + 3} little-endian doubles" in PAGE
    assert f"| 3 to {NUM_SUMS + 2} | {NUM_SUMS} signed sums" in PAGE
    assert f"| more, one dim | {VECTOR_WIDTH} |" in PAGE
