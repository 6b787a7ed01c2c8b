"""Configurations of transformers' trainer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from equivcheck import Outcome
from equivcheck.user.trainers.transformers import HFTrainer
from equivcheck.user.verdict import UserVerdict
from tools.trainers.frameworks.settings import SETTINGS, check_in_float32
from tools.trainers.frameworks.transformers_experts import VERSIONS as EXPERT_VERSIONS
from tools.trainers.frameworks.transformers_experts import expert_rows
from tools.trainers.rows import Framework, Row

VERSIONS = {"5.9.0": "0.22.2", "5.10.1": "0.22.2", "5.24.0": "0.23.3"}
"""Versions, and the version of tokenizers that each takes."""
FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
LAYOUTS: dict[str, dict[str, Any]] = {"DDP": {}, "FSDP2": FSDP2}
"""Arguments for `TrainingArguments`."""


def model() -> nn.Module:
    """Two tiny layers of Llama."""
    transformers = import_module("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    built: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))
    return built


def batches(num_microbatches: int) -> list[Any]:
    """Two updates. Rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(2 * num_microbatches):
        tokens = torch.randint(0, 32, (4, 8), generator=generator)
        labels = tokens.clone()
        for row in range(4):
            labels[row, : (3 * row + 2 * number) % 7] = -100
        made.append(({"input_ids": tokens, "labels": labels}, None))
    return [made[:num_microbatches], made[num_microbatches:]]


def check(num_microbatches: int, limit: float, **arguments: Any) -> UserVerdict:
    """Two updates on two ranks."""
    return check_in_float32(
        model=model,
        trainer=HFTrainer(arguments={"max_grad_norm": limit, **arguments}),
        batches=batches(num_microbatches),
        loss=lambda outputs, _: outputs.loss,
    )


def _rows() -> Iterator[Row]:
    for version in VERSIONS:
        counts_first = version == "5.9.0"  # each row's first label, which has no loss
        for layout, arguments in LAYOUTS.items():
            for name, (number, limit) in SETTINGS.items():
                yield Row(
                    version=version,
                    configuration=f"{layout}, {name}",
                    check=partial(check, number, limit, **arguments),
                    expected=Outcome.DIVERGED if counts_first else Outcome.EQUIVALENT,
                    cause="step 0 loss" if counts_first else "",
                    report="#46204" if counts_first else "",
                )
        yield Row(
            version=version,
            configuration="DDP, average_tokens_across_devices=False",
            check=partial(check, 1, 0.0, average_tokens_across_devices=False),
            expected=Outcome.DIVERGED,
            cause="step 0 loss" if counts_first else "each rank divides by its own count",
        )


TRANSFORMERS = Framework(
    name="transformers",
    versions={
        version: (f"transformers=={version}", f"tokenizers=={other}") for version, other in (EXPERT_VERSIONS | VERSIONS).items()
    },
    rows=(*_rows(), *expert_rows()),
    environment={"HF_HUB_OFFLINE": "1"},
)
