"""Times the diagnosis of planted faults in a Llama-like model: `python -m tools.bench_diagnosis`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck import check_training
from equivcheck.cli.options import console, json_option, print_json

HIDDEN, HEADS, FEATURES, LAYERS, VOCABULARY, TOKENS = 256, 4, 688, 2, 1000, 32
"""Sizes of the model, and tokens in each row."""
MAX_NORM = 0.5
TIMES = ("check_s", "check_cpu_s", "diagnosis_s", "diagnosis_cpu_s")
"""Columns of the table. CPU seconds are those of all threads, so other processes on the machine hardly change them."""


class Block(nn.Module):
    """Rotary attention and SwiGLU, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, FEATURES, bias=False) for _ in range(2))
        self.down = nn.Linear(FEATURES, HIDDEN, bias=False)

    def forward(self, inputs: torch.Tensor) -> Any:
        """Hidden states after attention and SwiGLU."""
        normed = self.attention_norm(inputs)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        hidden = inputs + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.norm(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=heads.dtype) / half)
    angles = torch.arange(heads.shape[-2], dtype=heads.dtype)[:, None] * rates
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1)


class Llama(nn.Module):
    """A Llama-like model."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        """Logits for each token."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def batches(steps: int = 2, rows: int = 4) -> list[Any]:
    """Tokens and the tokens that follow them, for each step."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, VOCABULARY, (rows, TOKENS + 1), generator=generator) for _ in range(steps)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, a mean over tokens."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _average(parameters: list[Any]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _sum(parameters: list[Any]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)


def _roll(parameters: list[Any]) -> None:
    _average(parameters)
    parameters[3].grad = parameters[3].grad.roll(1, 0)


def _nothing(*_: Any) -> None:
    pass


def _clip(parameters: list[Any]) -> None:
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def _clip_locally(parameters: list[Any]) -> None:
    local = [each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad for each in parameters]
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, nn.utils.get_total_norm(local))


def _clear_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _step(
    *,
    reduce: Callable[[list[Any]], None] = _average,
    clip: Callable[[list[Any]], None] = _clip,
    before: Callable[[torch.optim.Optimizer], None] = _nothing,
    zero: bool = True,
) -> Callable[..., Any]:
    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        if zero:
            optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        parameters = list(model.parameters())
        reduce(parameters)
        clip(parameters)
        before(optimizer)
        optimizer.step()
        return value.detach()

    return step


def _partial_down(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        heads = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        down = RowwiseParallel(output_layouts=Partial()) if number else RowwiseParallel()
        parallelize_module(layer, mesh, {**heads, "o": RowwiseParallel(), "down": down})
    return model


def _untied(model: Any, _mesh: DeviceMesh) -> Any:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _as_it_is(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    return model


def _sharded(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


FAULTS: dict[str, dict[str, Any]] = {
    "not reduced": {"rank_step": _step(reduce=_nothing)},
    "summed": {"rank_step": _step(reduce=_sum, clip=_nothing), "step": _step(reduce=_nothing, clip=_nothing)},
    "clipped by the local norm": {"rank_step": _step(reduce=_nothing, clip=_clip_locally), "parallelize": _sharded},
    "gradients not zeroed": {"rank_step": _step(zero=False)},
    "optimizer state lost": {"rank_step": _step(before=_clear_state)},
    "head untied": {"rank_step": _step(), "parallelize": _untied, "model": lambda: Llama(tied=True)},
    "partial output": {
        "rank_step": _step(reduce=_nothing, clip=_nothing),
        "step": _step(reduce=_nothing, clip=_nothing),
        "parallelize": _partial_down,
        "mesh": {"tp": 2},
    },
    "rows of a gradient moved (unknown)": {"rank_step": _step(reduce=_roll)},
}
"""Arguments of `check_training` by fault, in addition to the shared ones."""


def arguments_of(fault: str) -> dict[str, Any]:
    """Arguments of `check_training` for a planted fault."""
    shared: dict[str, Any] = {
        "model": Llama,
        "parallelize": _as_it_is,
        "mesh": {"dp": 2},
        "batches": batches(),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "step": _step(reduce=_nothing),
    }
    return shared | FAULTS[fault]


def measure(fault: str) -> dict[str, Any]:
    """Seconds of the check of a planted fault and of its diagnosis, by the clock and of the CPU."""
    started, started_cpu = time.perf_counter(), time.process_time()
    verdict = check_training(**arguments_of(fault))
    checked, checked_cpu = time.perf_counter(), time.process_time()
    text = verdict.describe()
    return {
        "fault": fault,
        "check_s": checked - started,
        "check_cpu_s": checked_cpu - started_cpu,
        "diagnosis_s": time.perf_counter() - checked,
        "diagnosis_cpu_s": time.process_time() - checked_cpu,
        "text": text,
    }


@click.command()
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)), help="Planted fault; may be repeated.")
@json_option
def main(faults: tuple[str, ...], as_json: bool) -> None:
    """Plant faults in a Llama-like model, and time the check and its diagnosis."""
    chosen = faults or tuple(FAULTS)
    rows = []
    for number, fault in enumerate(chosen, 1):
        click.echo(f"[{number}/{len(chosen)}] {fault} ...", err=True)
        row = measure(fault)
        rows.append(row)
        times = " ".join(f"{name} {row[name]:.1f}" for name in TIMES)
        click.echo(f"{times}\n{row['text']}", err=True)
    if as_json:
        print_json({"rows": rows})
        return
    table = Table("fault", *(name.replace("_", " ") for name in TIMES), box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(row["fault"], *(f"{row[name]:.1f}" for name in TIMES))
    console().print(table)


if __name__ == "__main__":
    main()
