"""Times checks of a small fine-tuning step in other batches: `python -m tools.bench_batching`.

Times are CPU seconds, so other programs on the machine hardly change them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import click
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from equivcheck import check_batching
from equivcheck.cli.options import json_option, print_json

VOCABULARY, WIDTH, ROWS, LENGTH, IGNORED = 50, 16, 4, 16, -100


def build() -> nn.Module:
    """Model from tokens to logits."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))


def step(model: nn.Module, microbatches: list[dict[str, torch.Tensor]], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """Mean over all counted tokens. On ranks it is a mean per rank, so it differs."""
    optimizer.zero_grad()
    count = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in microbatches)
    for batch in microbatches:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        (loss / count).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard with FSDP2, in place."""
    fully_shard(model, mesh=mesh)


def median_seconds(repetitions: int, **arguments: Any) -> tuple[float, int]:
    """Median CPU seconds of a warm check, and its number of arrangements."""
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    times = []
    for _ in range(repetitions + 1):
        started = time.process_time()
        found = check_batching(model=build, step=step, batch=batch, explain=False, **arguments)
        times.append(time.process_time() - started)
    return statistics.median(times[1:]), len(found.results)


@click.command()
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Timed checks of each kind.")
@json_option
def main(repetitions: int, as_json: bool) -> None:
    """Time checks on one device, and with two ranks as well."""
    alone, num_alone = median_seconds(repetitions)
    both, num_both = median_seconds(repetitions, mesh={"dp": 2}, parallelize=shard)
    on_ranks = (both - alone) / (num_both - num_alone)
    if as_json:
        print_json({"one_device": alone, "arrangements": num_alone, "per_distribution": on_ranks})
    else:
        click.echo(f"one device: {alone:.2f} CPU s for {num_alone} arrangements")
        click.echo(f"two ranks: {on_ranks:.3f} CPU s for each distribution of the rows")


if __name__ == "__main__":
    main()
