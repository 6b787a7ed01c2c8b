"""Times recording and comparing: `python -m tools.bench_recording`.

The overhead is a ratio from one run, so a noisy machine affects both sides.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from torch import nn

import equivcheck
from equivcheck.cli.options import console, json_option, print_json
from equivcheck.recording.sketch import sketch_parts
from equivcheck.recording.trace import Entry, Header, Moment, RecordedStep
from equivcheck.recording.trace_file import TraceWriter
from equivcheck.worlds.trace.trace import Piece

HIDDEN, LAYERS, VOCABULARY, TOKENS = 256, 6, 1000, 128
"""Sizes of the transformer, which has 5 M parameters, and tokens in each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured cost."""

    name: str
    """Cost, with its unit."""
    value: float
    """Median."""
    target: float | None = None
    """Upper limit; None for a figure that others refer to."""


class Transformer(nn.Module):
    """A transformer encoder with a head."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens: torch.Tensor) -> Any:
        """Logits for each token."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Median time of an action, after one call to warm up."""
    action()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def time_of_sums(repeats: int) -> Iterator[Figure]:
    """Sums over large and over small tensors."""
    large = [(Piece(name=str(shape), shape=shape), torch.randn(shape)) for shape in ((2048, 1024), (4096, 300), (1_000_000,))]
    numel = sum(piece.numel for piece, _ in large)
    yield Figure(name="ns an element and thread", value=seconds(lambda: sketch_parts(large), repeats) / numel * 1e9, target=6.0)
    shapes = [(HIDDEN,), (3 * HIDDEN,), (HIDDEN,), (4 * HIDDEN,), (8, 8), (4, 1, 9)]
    groups = {
        "same shapes": [(Piece(name=str(number), shape=shape), torch.randn(shape)) for number in range(50) for shape in shapes],
        "other shapes": [(Piece(name=str(number), shape=(number,)), torch.randn(number)) for number in range(700, 1000)],
    }
    for name, parts in groups.items():
        value = seconds(lambda parts=parts: sketch_parts(parts), repeats) / len(parts) * 1e3  # type: ignore[misc]
        yield Figure(name=f"ms a small tensor, {name}", value=value, target=0.03)


def time_of_a_step(repeats: int, layers: int, rows: int) -> Iterator[Figure]:
    """Steps with and without a recording, in turns."""
    torch.manual_seed(0)
    model = Transformer(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (rows, TOKENS))

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        optimizer.step()

    step()
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for is_recorded, found in times.items():
                with equivcheck.record(Path(folder, str(number))) if is_recorded else nullcontext():
                    step()  # which also records the initial parameters
                    started = time.perf_counter()
                    step()  # which first ends the step before
                    found.append(time.perf_counter() - started)
        size = Path(folder, "0", "rank0.ecr").read_text(encoding="utf-8").split("\n")[2]
    plain, recorded = map(statistics.median, (times[False], times[True]))
    yield Figure(name=f"ms a step of {tokens.numel():,} tokens, not recorded", value=plain * 1e3)
    yield Figure(name="% overhead on such a step", value=(recorded / plain - 1) * 100, target=10.0)
    num_tensors = 2 * len(list(model.parameters()))
    yield Figure(name="bytes a tensor and moment", value=len(size) / num_tensors, target=600.0)


def time_of_compare(repeats: int, num_tensors: int, steps: int, num_ranks: int) -> Iterator[Figure]:
    """One device against ranks that hold shards, and replicas against replicas."""
    shapes = [(num_ranks * 32, 8) if number % 2 else (num_ranks * 16,) for number in range(num_tensors)]
    tensors = [(f"layers.{number}.weight", torch.randn(shape)) for number, shape in enumerate(shapes)]
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder, name) for name in ("one", "sharded", "replicated")}
        for name, run in runs.items():
            for rank in range(num_ranks if name != "one" else 1):
                _write(run, tensors, steps, (rank, num_ranks if name != "one" else 1), is_sharded=name == "sharded")
        for one, other in (("one", "sharded"), ("replicated", "replicated")):
            value = seconds(lambda one=one, other=other: equivcheck.compare(runs[one], runs[other]), repeats)  # type: ignore[misc]
            name = f"s to compare {num_tensors} tensors, {steps} steps, {num_ranks} ranks: {one} and {other}"
            yield Figure(name=name, value=value, target=1.0)


def _write(
    folder: Path, tensors: list[tuple[str, torch.Tensor]], steps: int, place: tuple[int, int], *, is_sharded: bool
) -> None:
    rank, num_ranks = place
    parts = []
    for name, tensor in tensors:
        piece, local = Piece(name=name, shape=tuple(tensor.shape)), tensor
        if is_sharded:
            local = tensor.chunk(num_ranks)[rank]
            start = (rank * local.shape[0], *([0] * (local.dim() - 1)))
            piece = Piece(name=name, shape=piece.shape, start=start, size=tuple(local.shape))
        parts.append((piece, local))
    sketches = sketch_parts(parts)
    writer = TraceWriter(folder, Header(rank=rank, num_ranks=num_ranks, argv=(), environment={}))
    for step in range(steps):
        moments = [*([Moment.START] if step == 0 else []), Moment.GRADIENT, Moment.UPDATE]
        entries = [
            Entry(moment=moment, piece=piece, dtype="float32", sketch=sketch)
            for moment in moments
            for (piece, _), sketch in zip(parts, sketches, strict=True)
        ]
        writer.write(RecordedStep(step=step, losses=(1.0,), entries=tuple(entries)))
    writer.close()


@click.command()
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True, help="Measurements for each median.")
@click.option("--small", is_flag=True, help="Use a small model and few tensors, to try the benchmark itself.")
@json_option
def main(repeats: int, small: bool, as_json: bool) -> None:
    """Measure the cost of recording and comparing on this machine."""
    figures: list[Figure] = []
    for found in (
        time_of_sums(repeats),
        time_of_a_step(repeats, *((1, 1) if small else (LAYERS, 2048 // TOKENS))),
        time_of_compare(repeats, *((4, 2, 2) if small else (300, 10, 8))),
    ):
        for figure in found:
            figures.append(figure)
            click.echo(f"{figure.value:.3g} {figure.name}", err=True)
    if as_json:
        print_json({"figures": [asdict(figure) for figure in figures], "threads": torch.get_num_threads()})
        return
    table = Table("cost", box=None, pad_edge=False, header_style="bold")
    for heading in ("measured", "target"):
        table.add_column(heading, justify="right")
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.3g}", "-" if figure.target is None else f"{figure.target:g}")
    console().print(table)


if __name__ == "__main__":
    main()
