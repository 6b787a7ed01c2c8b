"""Losses of TRL's trainers on one device: weighted losses of parts are the loss of the batch. TRL is not needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equivcheck.user.trainers.trl_losses import (
    IGNORED,
    count_labels,
    dpo_loss,
    forward_inputs,
    grpo_loss,
    model_inputs,
    reward_loss,
    sft_loss,
)

ROWS, LENGTH, VOCABULARY = 6, 5, 7
Batch = dict[str, torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    """Tokens."""
    return torch.randint(0, VOCABULARY, shape)


def mask() -> torch.Tensor:
    """A prompt of one token, and completions of unequal lengths."""
    return torch.arange(LENGTH) < torch.tensor([[2], [5], [3], [4], [1], [5]])


def batches() -> dict[str, Batch]:
    """A batch for each trainer."""
    torch.manual_seed(0)
    tokens = drawn(ROWS, LENGTH)
    pair = {f"{name}_input_ids": drawn(ROWS, LENGTH) for name in ("chosen", "rejected")}
    masks = {f"{name}_completion_mask": mask().long() for name in ("chosen", "rejected")}
    reference = {f"ref_{name}_logps": torch.randn(ROWS) for name in ("chosen", "rejected")}
    prompt = {"prompt_ids": drawn(ROWS, 2), "prompt_mask": torch.ones(ROWS, 2).long()}
    completion = {"completion_ids": tokens, "completion_mask": mask().long(), "advantages": torch.randn(ROWS)}
    return {
        "SFT": {"input_ids": tokens, "labels": tokens.masked_fill(~mask(), IGNORED)},
        "Reward": pair,
        "DPO": pair | masks | reference,
        "GRPO": prompt | completion,
    }


def output(batch: Batch, *, is_reward: bool = False) -> Any:
    """Logits that depend on the tokens."""
    torch.manual_seed(1)
    table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64)
    logits = table[forward_inputs(batch)["input_ids"]]
    return SimpleNamespace(logits=logits[:, 0, :1] if is_reward else logits)


@pytest.mark.parametrize(
    ("kind", "loss", "count"),
    [
        ("SFT", sft_loss, count_labels),
        ("GRPO", grpo_loss, count_labels),
        ("GRPO", partial(grpo_loss, mean_over="rows"), lambda _batch: 1),
        ("DPO", dpo_loss, lambda _batch: 1),
        ("Reward", reward_loss, lambda _batch: 1),
    ],
)
def test_the_weighted_mean_over_parts_is_the_loss(kind: str, loss: Callable[..., Any], count: Callable[[Batch], int]) -> None:
    """Weights are numbers of labels, or equal."""
    batch = batches()[kind]
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 2), slice(2, 4), slice(4, 6))]
    of = partial(output, is_reward=kind == "Reward")
    mean = sum(loss(of(part), part) * count(part) for part in parts) / sum(map(count, parts))
    torch.testing.assert_close(mean, loss(of(batch), batch))


def test_chosen_rows_come_first() -> None:
    """TRL splits the model's outputs into halves."""
    batch = batches()["DPO"]
    inputs = model_inputs(batch)
    assert torch.equal(inputs["input_ids"][:ROWS], batch["chosen_input_ids"])
    assert set(forward_inputs(batch)) == {"input_ids"}
