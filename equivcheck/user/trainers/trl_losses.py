"""TRL's losses on one device, in plain PyTorch. Each loss gets a model's output and the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.nn import functional

IGNORED = -100
"""Label without a loss."""
PAIRS = ("DPO", "Reward")
"""Trainers whose batches have keys that begin with ``chosen_`` and ``rejected_``."""
Batch: TypeAlias = Mapping[str, torch.Tensor]
"""Token numbers, masks and labels, with rows first."""


def model_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the model's keywords from a batch, as TRL passes them.

    Chosen answers come before rejected ones, and prompts before completions.
    """
    if "completion_ids" in batch:
        parts = (("input_ids", "ids"), ("attention_mask", "mask"))
        return {name: torch.cat([batch[f"prompt_{key}"], batch[f"completion_{key}"]], 1) for name, key in parts}
    names = [key.removeprefix("chosen_") for key in batch if key.startswith("chosen_")]
    if names:
        return {name: torch.cat([batch[f"chosen_{name}"], batch[f"rejected_{name}"]]) for name in names}
    return {key: value for key, value in batch.items() if key != "labels"}


def forward_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the keywords that the single-device run passes to the model: token ids, positions and the attention mask."""
    keys = {"input_ids", "position_ids", "attention_mask"}
    return {key: value for key, value in model_inputs(batch).items() if key in keys}


def count_labels(batch: Batch) -> int:
    """Return how many tokens in a batch have a loss."""
    if "completion_mask" in batch:
        return int(batch["completion_mask"].sum())
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return each token's log-probability, except for the first."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def sft_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Return SFT's loss: the mean over all labels."""
    labels = batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, ignore_index=IGNORED)


def reward_loss(output: Any, _batch: Batch) -> torch.Tensor:
    """Return the reward trainer's loss: the mean over pairs of answers."""
    chosen, rejected = output.logits[:, 0].chunk(2)
    return -functional.logsigmoid(chosen - rejected).mean()


def dpo_loss(output: Any, batch: Batch, beta: float = 0.1) -> torch.Tensor:
    """Return DPO's loss: the mean over pairs of answers. `beta` is DPO's temperature."""
    inputs = model_inputs(batch)
    scores = (_log_probabilities(output.logits, inputs["input_ids"]) * inputs["completion_mask"][:, 1:]).sum(1)
    chosen, rejected = scores.chunk(2)
    ratio = (chosen - batch["ref_chosen_logps"]) - (rejected - batch["ref_rejected_logps"])
    return -functional.logsigmoid(beta * ratio).mean()


def grpo_loss(output: Any, batch: Batch, *, mean_over: str = "tokens") -> torch.Tensor:
    """Return GRPO's loss. If `mean_over` is ``tokens``, it is the mean over all tokens (loss type dapo).

    Otherwise it is the mean of the rows' means (loss type grpo). Ratios are 1, because each batch is trained on once.
    """
    tokens, mask = model_inputs(batch)["input_ids"], batch["completion_mask"]
    found = _log_probabilities(output.logits, tokens)[:, -mask.shape[1] :]
    losses = -(found - found.detach()).exp() * batch["advantages"][:, None] * mask
    if mean_over == "tokens":
        return losses.sum() / mask.sum()
    return (losses.sum(1) / mask.sum(1)).mean()
