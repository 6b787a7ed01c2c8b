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


def model(attention: str = "sdpa") -> nn.Module:
    """Two tiny layers of Llama."""
    transformers = import_module("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False, attn_implementation=attention)
    built: nn.Module = transformers.LlamaForCausalLM(config)
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


def pack(batch: Any) -> Any:
    """Return a batch with two documents in each row: positions begin again, and the second document's first label is ignored."""
    rows, length = batch["input_ids"].shape
    lengths, positions = 2 + torch.arange(rows)[:, None], torch.arange(length).expand(rows, -1)
    labels = batch["labels"].masked_fill(positions == lengths, -100)
    again = torch.where(positions < lengths, positions, positions - lengths)
    return {"input_ids": batch["input_ids"], "position_ids": again, "labels": labels}


def packed_batches(num_microbatches: int) -> list[Any]:
    """Two updates of packed rows."""
    return [[(pack(batch), None) for batch, _ in update] for update in batches(num_microbatches)]


def check_split(num_microbatches: int, limit: float) -> UserVerdict:
    """Two updates under tensor parallelism. Each row's first label is -100, because 5.9.0 counts it otherwise (#46204)."""
    made = batches(num_microbatches)
    for batch, _ in (each for update in made for each in update):
        batch["labels"][:, 0] = -100
    trainer = HFTrainer(arguments={"max_grad_norm": limit})
    return check_in_float32(mesh={"tp": 2}, model=model, trainer=trainer, batches=made, loss=lambda outputs, _: outputs.loss)


def check(num_microbatches: int, limit: float, *, attention: str = "", **arguments: Any) -> UserVerdict:
    """Two updates on two ranks. If the implementation of attention is given, rows are packed."""
    return check_in_float32(
        model=partial(model, attention) if attention else model,
        trainer=HFTrainer(arguments={"max_grad_norm": limit, **arguments}),
        batches=packed_batches(num_microbatches) if attention else batches(num_microbatches),
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


SPLIT: dict[tuple[str, str], tuple[str, str]] = {
    ("5.9.0", "1 microbatch"): ("step 0 loss", "#45994"),
    ("5.9.0", "3 microbatches, clipping"): ("step 0 loss", "#45994"),
    ("5.10.1", "1 microbatch"): ("step 0 reported norm", "none"),
    ("5.10.1", "3 microbatches, clipping"): ("each rank clips by its local norm", "none"),
}
"""Mistakes under tensor parallelism: a loss that counts each rank, and norms that cover a rank's own elements."""


def _split_rows() -> Iterator[Row]:
    for version in VERSIONS:
        for name in ("1 microbatch", "3 microbatches, clipping"):
            cause, report = SPLIT.get((version, name), ("", ""))
            yield Row(
                version=version,
                configuration=f"TP, {name}",
                check=partial(check_split, *SETTINGS[name]),
                expected=Outcome.DIVERGED if cause else Outcome.EQUIVALENT,
                cause=cause,
                report=report,
            )


def _packed_rows() -> Iterator[Row]:
    for attention in ("eager", "sdpa"):
        packed = partial(check, 3, 0.1, attention=attention)
        yield Row(version="5.24.0", configuration=f"DDP, packed, {attention}, 3 microbatches, clipping", check=packed)


TRANSFORMERS = Framework(
    name="transformers",
    versions={
        version: (f"transformers=={version}", f"tokenizers=={other}") for version, other in (EXPERT_VERSIONS | VERSIONS).items()
    },
    rows=(*_rows(), *_split_rows(), *_packed_rows(), *expert_rows()),
    environment={"HF_HUB_OFFLINE": "1"},
)
