"""Configurations of TRL's trainers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from equivcheck import Outcome
from equivcheck.user.trainers.trl import TRL
from equivcheck.user.trainers.trl_losses import dpo_loss, grpo_loss, reward_loss, sft_loss
from equivcheck.user.verdict import UserVerdict
from tools.trainers.frameworks.settings import SETTINGS, check_in_float32
from tools.trainers.frameworks.transformers import pack
from tools.trainers.rows import Framework, Row

VERSION = "1.16.0"
ROWS, PROMPT, LENGTH, VOCABULARY = 4, 3, 8, 32
LOSSES: dict[str, Any] = {"SFT": sft_loss, "DPO": dpo_loss, "Reward": reward_loss, "GRPO": grpo_loss}


def model(kind: str) -> nn.Module:
    """Two tiny layers of Llama."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(**sizes, **heads, use_cache=False, pad_token_id=0, num_labels=1)
    head = transformers.LlamaForSequenceClassification if kind == "Reward" else transformers.LlamaForCausalLM
    built: nn.Module = head(config)
    return built


class Drawn:
    """Batches of tokens. Completions have unequal lengths."""

    def __init__(self, *, is_even: bool = False) -> None:
        self.is_even = is_even
        self.generator = torch.Generator().manual_seed(0)

    def tokens(self, length: int = LENGTH) -> torch.Tensor:
        """No padding."""
        return torch.randint(4, VOCABULARY, (ROWS, length), generator=self.generator)

    def mask(self, length: int) -> torch.Tensor:
        """At least one position in each row."""
        if self.is_even:
            return torch.ones(ROWS, length).long()
        return (torch.arange(length) < torch.randint(1, length + 1, (ROWS, 1), generator=self.generator)).long()

    def answer(self, name: str) -> dict[str, torch.Tensor]:
        """Half of a pair: a prompt, and a completion of another length."""
        is_given, is_answer = torch.ones(ROWS, PROMPT).long(), self.mask(LENGTH - PROMPT)
        attention = torch.cat([is_given, is_answer], 1)
        keys = {"input_ids": self.tokens() * attention, "attention_mask": attention}
        return {f"{name}_{key}": value for key, value in keys.items()} | {
            f"{name}_completion_mask": attention - torch.cat([is_given, 0 * is_answer], 1)
        }

    def batch(self, kind: str) -> Any:
        """A microbatch for a trainer."""
        if kind == "SFT":
            tokens = self.tokens()
            labels = tokens.masked_fill(self.mask(LENGTH) == 0, -100)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}, None
        if kind == "GRPO":
            prompt = {"prompt_ids": self.tokens(PROMPT), "prompt_mask": torch.ones(ROWS, PROMPT).long()}
            completion = {"completion_ids": self.tokens(), "completion_mask": self.mask(LENGTH)}
            return prompt | completion | {"advantages": torch.randn(ROWS, generator=self.generator)}, None
        pair = self.answer("chosen") | self.answer("rejected")
        if kind == "Reward":
            return {key: value for key, value in pair.items() if "completion" not in key}, None
        reference = {f"ref_{name}_logps": torch.randn(ROWS, generator=self.generator) - 9 for name in ("chosen", "rejected")}
        return pair | reference, None


def check(
    kind: Any, num_microbatches: int, limit: float, loss: Any = None, *, is_packed: bool = False, **arguments: Any
) -> UserVerdict:
    """Two updates on two ranks."""
    drawn = Drawn()
    batches = [[drawn.batch(kind) for _ in range(num_microbatches)] for _ in range(2)]
    if is_packed:
        batches = [[(pack(batch), None) for batch, _ in update] for update in batches]
    return check_in_float32(
        model=partial(model, kind),
        trainer=TRL(kind=kind, arguments={"max_grad_norm": limit, **arguments}),
        batches=batches,
        loss=loss or LOSSES[kind],
    )


def _rows() -> Iterator[Row]:
    row = partial(Row, version=VERSION)
    for kind in LOSSES:
        for name, setting in SETTINGS.items():
            yield row(configuration=f"{kind}, {name}", check=partial(check, kind, *setting))
    packed = partial(check, "SFT", 3, 0.1, is_packed=True, padding_free=True, max_length=None)
    yield row(configuration="SFT, packed, padding_free, 3 microbatches, clipping", check=packed)
    over_rows = partial(check, "GRPO", 3, 0.0, partial(grpo_loss, mean_over="rows"), loss_type="grpo")
    yield row(configuration="GRPO, loss_type=grpo, 3 microbatches", check=over_rows)
    yield row(
        configuration="SFT, average_tokens_across_devices=False, 3 microbatches",
        check=partial(check, "SFT", 3, 0.0, average_tokens_across_devices=False),
        expected=Outcome.DIVERGED,
        cause="each rank divides by its own count",
    )


TRL_TRAINERS = Framework(
    name="TRL",
    versions={VERSION: (f"trl=={VERSION}", "transformers==5.24.0", "tokenizers==0.23.3")},
    rows=(*_rows(),),
    environment={"HF_HUB_OFFLINE": "1"},
)
