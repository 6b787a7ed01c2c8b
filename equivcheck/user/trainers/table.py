"""Checks one trainer in several configurations, on a small model: stages x microbatches per update x clipping limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import ElementType, MixedPrecision
from equivcheck.user.matrix.matrix import Listener, Matrix
from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import LayoutRow
from equivcheck.user.trainers.deepspeed import DeepSpeed, require_complete
from equivcheck.user.trainers.model import TrainerModel
from equivcheck.user.trainers.protocol import Trainer, import_or_refuse
from equivcheck.user.trainers.transformers import PACKAGES, HFTrainer

NUM_UPDATES, ROWS_PER_RANK = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerKind:
    """A framework's trainer, and a small model that it can train."""

    make: Callable[[Mapping[str, Any], float], Trainer]
    """Function that builds the adapter from a configuration and a clipping limit. The limit is 0.0 for none."""
    model: TrainerModel
    """The small model, unless the user brings one."""
    with_stage: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None
    """Called with a configuration and a sharding stage, returns the configuration with this stage. None for trainers without
    stages.
    """
    stage_of: Callable[[Mapping[str, Any]], int | None] = lambda _config: None
    """Called with a configuration, returns its sharding stage, or None if it has none."""
    precision_of: Callable[[Mapping[str, Any]], MixedPrecision | None] = lambda _config: None
    """Called with a configuration, returns its mixed-precision policy, or None if it has none."""


def configurations(
    kind: TrainerKind, name: str, config: Mapping[str, Any], stages: Sequence[int]
) -> dict[str, Mapping[str, Any]]:
    """Return the configuration for each sharding stage, such as a ZeRO stage in DeepSpeed, by the stage's name.

    If `stages` is empty, use the stage in `config`, or all stages if it has none. Raises `UsageError` if stages are given for a
    trainer without stages.
    """
    if kind.with_stage is None:
        if stages:
            raise UsageError(f"--stage {stages[0]} is not valid: trainer {name} has no stages. Expected no --stage.")
        return {"": config}
    own = kind.stage_of(config)
    chosen = stages or ((0, 1, 2, 3) if own is None else (own,))
    return {f"stage {stage}, ": kind.with_stage(config, stage) for stage in chosen}


def check_configurations(  # noqa: PLR0913 - options
    kind: TrainerKind,
    configs: Mapping[str, Mapping[str, Any]],
    *,
    accumulate: Sequence[int],
    limits: Sequence[float],
    num_ranks: int,
    world: str,
    listener: Listener,
    brought: TrainerModel | None = None,
) -> MatrixResult:
    """Check each configuration with each number of microbatches in an update and each clipping limit.

    `brought` replaces the built-in model. `listener` is called with each row and the number of rows so far.
    """
    small, rows = brought or kind.model, list[LayoutRow]()
    for name, config in configs.items():
        for number in accumulate:
            layouts = {f"{name}accumulate {number}, clip {limit:g}": {"trainer": kind.make(config, limit)} for limit in limits}
            precision = kind.precision_of(config)
            matrix = Matrix(
                model=small.model if precision is None else partial(_rounded, small.model, precision),
                batches=_batches(small, num_ranks, number),
                loss=small.loss,
                optimizer=small.optimizer,
                mesh={"dp": num_ranks},
                dtype=torch.float32,
                precision=precision,
                world=world,
                layouts=layouts,
            )
            for layout in matrix.names:
                rows.append(matrix.row(layout))
                listener(rows[-1], len(rows))
    return MatrixResult(rows=tuple(rows), asked=len(rows))


def _batches(small: TrainerModel, num_ranks: int, num_microbatches: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [[small.draw(ROWS_PER_RANK * num_ranks, generator) for _ in range(num_microbatches)] for _ in range(NUM_UPDATES)]


def _rounded(build: Callable[[], nn.Module], precision: MixedPrecision) -> nn.Module:
    """Build a model whose initial weights are exact in low precision, because master weights start from rounded weights."""
    assert precision.param is not None, "trainers compute in it"
    return build().to(getattr(torch, precision.param.value))


def is_undecided(found: MatrixResult) -> bool:
    """Whether at least one configuration is INCONCLUSIVE, and all other checked configurations have their expected outcome."""
    outcomes = {row.verdict.outcome for row in found.unexpected if row.verdict is not None}
    return outcomes == {Outcome.INCONCLUSIVE}


def _layers() -> nn.Module:
    """Build layers of odd sizes, so that partitions may split them anywhere."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _numbers(rows: int, generator: torch.Generator) -> Any:
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def _llama() -> nn.Module:
    transformers = import_or_refuse("HFTrainer", "transformers", PACKAGES)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))
    return model


def _tokens(rows: int, generator: torch.Generator) -> Any:
    """Draw tokens, with different numbers of labels in each row."""
    tokens = torch.randint(0, 32, (rows, 8), generator=generator)
    is_ignored = torch.arange(8) < torch.randint(0, 7, (rows, 1), generator=generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(is_ignored, -100)}, None


def _squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared error in float32, also for outputs in low precision."""
    return nn.functional.mse_loss(outputs.to(targets.dtype), targets)


def _deepspeed(config: Mapping[str, Any], limit: float) -> Trainer:
    return DeepSpeed(config={**config, "gradient_clipping": limit})


def _with_stage(config: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    return {**config, "zero_optimization": {**config.get("zero_optimization", {}), "stage": stage}}


def _stage_of(config: Mapping[str, Any]) -> int | None:
    require_complete({**config, "gradient_clipping": 0.0})  # the command sets it
    found: int | None = config.get("zero_optimization", {}).get("stage")
    return found


def _precision_of(config: Mapping[str, Any]) -> MixedPrecision | None:
    names = {"bf16": ElementType.BFLOAT16, "fp16": ElementType.FLOAT16}
    kind = next((kind for name, kind in names.items() if config.get(name, {}).get("enabled")), None)
    reduces_in_float32 = config.get("communication_data_type") == "fp32"
    return kind and MixedPrecision(param=kind, reduce=ElementType.FLOAT32 if reduces_in_float32 else kind)


def _transformers(config: Mapping[str, Any], limit: float) -> Trainer:
    return HFTrainer(arguments={**config, "max_grad_norm": limit})


LAYERS = TrainerModel(model=_layers, draw=_numbers, loss=_squared_error)
"""Small model, microbatches and loss for a trainer whose loss is a function of outputs and targets."""
LLAMA = TrainerModel(model=_llama, draw=_tokens, loss=lambda outputs, _targets: outputs.loss)
"""Small model that returns its loss."""
KINDS = {
    "deepspeed": TrainerKind(
        make=_deepspeed, model=LAYERS, with_stage=_with_stage, stage_of=_stage_of, precision_of=_precision_of
    ),
    "transformers": TrainerKind(make=_transformers, model=LLAMA),
}
"""Trainers by name."""
