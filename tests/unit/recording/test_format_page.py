"""The page about the trace format names every field, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from equivcheck.recording.exact import ExactHash, hash_parts
from equivcheck.recording.signs import NUM_SUMS, VECTOR_WIDTH
from equivcheck.recording.sketch import FORMAT_VERSION, Sketch
from equivcheck.recording.trace import Clip, Entry, Header, Moment, Output, RecordedStep
from equivcheck.recording.trace_file import TraceWriter, read_trace
from equivcheck.recording.watch.record import record
from equivcheck.recording.watch.samples import hash_samples
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


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    """Functions in the page's first example."""
    namespace: dict[str, Callable[..., int]] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0], namespace)
    return SimpleNamespace(**namespace)


def words_of(tensor: torch.Tensor) -> npt.NDArray[np.signedinteger]:
    """A tensor's bits as integers with four bytes or fewer, or 0 and 1."""
    values = tensor.numpy()
    return values.astype(np.int8) if values.dtype == bool else values.view(f"<i{min(values.itemsize, 4)}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.bool])
def test_exact_hashes_are_those_of_the_page(page: SimpleNamespace, dtype: torch.dtype) -> None:
    """For a matrix with 32 columns, so that the width is 32."""
    tensor = torch.randn(24, 32, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    in_place = anywhere = 0
    for index, bits in enumerate(words_of(tensor).reshape(-1).tolist()):
        row, column = page.hashes(index, 32)
        in_place += bits * (row | 1) * (column | 1)
        anywhere += page.splitmix64(bits % 2**64)
    (found,) = hash_parts([(Piece(name="weight", shape=(24, 32)), tensor)])
    assert found == ExactHash(in_place=in_place % 2**64, anywhere=anywhere % 2**64)


def test_sample_hashes_are_those_of_the_page(page: SimpleNamespace) -> None:
    """Over several tensors, with elements of one, four and eight bytes; a scalar is left out."""
    tokens = torch.tensor([[5, 7, -2], [2**40, 0, 1]])
    tensors = [tokens, torch.tensor([True, False]), torch.tensor(0.5), torch.randn(2, 2, 2)]
    found = hash_samples(tensors)
    assert found is not None
    for row in range(2):
        expected = 0
        for tensor in (tensors[0], tensors[1], tensors[3]):
            words = words_of(tensor[row].reshape(-1)).tolist()
            total = sum(word * (page.splitmix64(at) | 1) for at, word in enumerate(words))
            expected = page.splitmix64((expected + total) % 2**64)
        assert found[row].item() % 2**64 == expected


def test_output_sketches_are_those_of_the_page(page: SimpleNamespace, tmp_path: Path) -> None:
    """Signs are those of the element in its sample, changed by the sample's hash."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(5, 3)
    expected = model(inputs).detach().tolist()
    with record(tmp_path, outputs=True):
        model(inputs).sum().backward()
        optimizer.step()
    step = read_trace(tmp_path)[0].steps[0]
    (output,) = step.outputs
    assert (output.module, output.shape) == ("", (4,))
    for j in range(NUM_SUMS):
        total = 0.0
        for sample, row in zip(step.samples[0], expected, strict=True):
            signs = [page.sign(*page.hashes(column, 4), j) for column in range(4)]
            own = sum(sign * value for sign, value in zip(signs, row, strict=True))
            total += -own if sample >> (32 + j) & 1 else own
        assert output.sketch.sums[j] == pytest.approx(total, rel=1e-6, abs=1e-6)
