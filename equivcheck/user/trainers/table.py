"""One trainer in several configurations: microbatches per update x clipping limits, on a small built-in model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.user.matrix.matrix import Listener, Matrix
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import LayoutRow
from equivcheck.user.trainers.deepspeed import DeepSpeed
from equivcheck.user.trainers.protocol import Trainer
from equivcheck.user.trainers.transformers import HFTrainer

NUM_UPDATES, ROWS_PER_RANK = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerKind:
    """A framework's trainer, and a small model that it can train."""

    make: Callable[[Mapping[str, Any], float], Trainer]
    """Builds the adapter from the user's configuration and a clipping limit, or 0.0 for none."""
    model: Callable[[], nn.Module]
    """Builds the model."""
    draw: Callable[[int, torch.Generator], Any]
    """Draws a microbatch with this number of rows."""
    loss: Callable[[Any, Any], torch.Tensor]
    """Called with outputs and targets."""


def check_configurations(  # noqa: PLR0913 - options
    kind: TrainerKind,
    config: Mapping[str, Any],
    *,
    accumulate: Sequence[int],
    limits: Sequence[float],
    num_ranks: int,
    world: str,
    listener: Listener,
) -> MatrixResult:
    """Check all pairs. Every other field in `config` stays unchanged."""
    rows = list[LayoutRow]()
    for number in accumulate:
        layouts = {f"accumulate {number}, clip {limit:g}": {"trainer": kind.make(config, limit)} for limit in limits}
        generator = torch.Generator().manual_seed(0)
        drawn = [[kind.draw(ROWS_PER_RANK * num_ranks, generator) for _ in range(number)] for _ in range(NUM_UPDATES)]
        matrix = Matrix(
            model=kind.model,
            batches=drawn,
            loss=kind.loss,
            optimizer=partial(torch.optim.AdamW, lr=0.01),
            mesh={"dp": num_ranks},
            dtype=torch.float32,
            world=world,
            layouts=layouts,
        )
        for name in matrix.names:
            rows.append(matrix.row(name))
            listener(rows[-1], len(rows))
    return MatrixResult(rows=tuple(rows), asked=len(rows))


def is_undecided(found: MatrixResult) -> bool:
    """Whether some rows are INCONCLUSIVE and no row is wrong."""
    outcomes = {row.verdict.outcome for row in found.unexpected if row.verdict is not None}
    return outcomes == {Outcome.INCONCLUSIVE}


def _layers() -> nn.Module:
    """Layers of odd sizes, which partitions cut anywhere."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _numbers(rows: int, generator: torch.Generator) -> Any:
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def _llama() -> nn.Module:
    transformers = import_module("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))
    return model


def _tokens(rows: int, generator: torch.Generator) -> Any:
    """Tokens, with unequal numbers of labels by row."""
    tokens = torch.randint(0, 32, (rows, 8), generator=generator)
    is_ignored = torch.arange(8) < torch.randint(0, 7, (rows, 1), generator=generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(is_ignored, -100)}, None


def _deepspeed(config: Mapping[str, Any], limit: float) -> Trainer:
    return DeepSpeed(config={**config, "gradient_clipping": limit})


def _transformers(config: Mapping[str, Any], limit: float) -> Trainer:
    return HFTrainer(arguments={**config, "max_grad_norm": limit})


LAYERS: dict[str, Any] = {"model": _layers, "draw": _numbers, "loss": nn.functional.mse_loss}
"""Small model, microbatches and loss for a trainer whose loss is a function of outputs and targets."""
KINDS = {
    "deepspeed": TrainerKind(make=_deepspeed, **LAYERS),
    "transformers": TrainerKind(make=_transformers, model=_llama, draw=_tokens, loss=lambda outputs, _targets: outputs.loss),
}
"""Trainers by name."""
