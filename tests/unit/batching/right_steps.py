"""Right steps, with their models, batches and declarations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unit.batching import objectives, steps
from unit.batching.objectives import TwoHeads
from unit.batching.steps import Batch, Causal, losses, numbers, step_of, summed, tokens

BOTH: dict[str, Any] = {"padding_side": ("right", "left")}
TOKEN, SEQUENCE, NONE = ({"normaliser": name} for name in ("token", "sequence", "none"))


def linear() -> nn.Module:
    """A model for rows of three numbers."""
    return nn.Linear(3, 3)


def mean_of(own: Callable[[Any, Batch], torch.Tensor], number: Callable[[Batch], torch.Tensor]) -> steps.Step:
    """Sum of `own`, divided by the number in all microbatches."""
    return step_of(lambda model, batch, batches: own(model, batch).sum() / summed(number, batches))


def predicted(model: Any, batch: Batch) -> torch.Tensor:
    """Losses of tokens that no padding predicts."""
    labels = batch["labels"].clone()
    labels[:, 1:][batch["attention_mask"][:, :-1] == 0] = steps.IGNORED
    return losses(model, batch, labels)


def num_predicted(batch: Batch) -> torch.Tensor:
    """Counted tokens that no padding predicts."""
    return ((batch["labels"][:, 1:] != steps.IGNORED) & (batch["attention_mask"][:, :-1] == 1)).sum()


def clipped(model: Any, batches: list[Batch], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """Clips after the last microbatch."""
    optimizer.zero_grad()
    for batch in batches:
        (losses(model, batch).sum() / summed(steps.count, batches)).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    """The usual optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def with_distillation(model: Any, batch: Batch) -> torch.Tensor:
    """Cross-entropy and KL divergence, with one count."""
    return losses(model, batch) + 0.5 * objectives.distillation_losses(model, batch)


def with_divergence(model: Any, batch: Batch) -> torch.Tensor:
    """A policy's loss, and its squared log-probabilities."""
    own = losses(model, batch, batch["input_ids"]) * batch["completion_mask"][:, 1:]
    return objectives.policy_losses(model, batch) + 0.1 * own.square()


def regression(model: Any, batch: Batch) -> torch.Tensor:
    """Squared errors of rewards from each row's last token."""
    return (objectives.pooled_rewards(model, batch) - batch["rewards"]).square()


def mean_over_negatives(model: Any, batch: Any, batches: list[Any]) -> torch.Tensor:
    """A contrastive loss, averaged over microbatches."""
    return steps.contrastive(model, batch, [batch]) / len(batches)


RIGHT: dict[str, tuple[Any, Any, Callable[[], Any], dict[str, Any]]] = {
    "tokens, packed": (Causal, steps.token_mean, tokens, TOKEN | {"packing": "position_ids"}),
    "tokens, packed by documents": (Causal, steps.token_mean, tokens, {"packing": "document_ids"}),
    "tokens, padded on both sides": (Causal, mean_of(predicted, num_predicted), tokens, TOKEN | BOTH),
    "tokens, window": (Causal, steps.token_mean, tokens, TOKEN | {"window": 3}),
    "tokens, even": (Causal, steps.token_mean, tokens, TOKEN | {"microbatches": "even"}),
    "tokens, evaluated": (Causal, steps.token_mean, tokens, TOKEN | {"evaluate": steps.evaluate}),
    "tokens, clipped": (Causal, clipped, tokens, TOKEN),
    "sequences": (Causal, steps.sequence_mean, tokens, SEQUENCE),
    "sum": (Causal, steps.token_sum, tokens, NONE),
    "router": (Causal, steps.with_router(lambda batches: 1 / len(batches)), tokens, {"microbatch_loss": ("router",)}),
    "z-loss": (Causal, step_of(objectives.with_z_loss()), tokens, TOKEN),
    "two heads": (TwoHeads, step_of(objectives.with_second_head()), tokens, TOKEN | BOTH),
    "two heads, packed": (TwoHeads, step_of(objectives.with_second_head()), tokens, TOKEN | {"packing": "position_ids"}),
    "DPO": (Causal, mean_of(objectives.preference_losses, objectives.num_pairs), objectives.preferences, SEQUENCE),
    "GRPO, tokens": (Causal, mean_of(objectives.policy_losses, objectives.num_completion), objectives.policies, TOKEN),
    "GRPO, sequences": (Causal, mean_of(objectives.completion_means, steps.num_rows), objectives.policies, SEQUENCE),
    "GRPO with divergence": (Causal, mean_of(with_divergence, objectives.num_completion), objectives.policies, TOKEN),
    "distillation": (Causal, mean_of(objectives.distillation_losses, steps.count), objectives.distillation, TOKEN),
    "distillation and tokens": (Causal, mean_of(with_distillation, steps.count), objectives.distillation, TOKEN),
    "rewards": (Causal, mean_of(regression, steps.num_rows), objectives.rewards, SEQUENCE),
    "completions": (Causal, step_of(steps.masked), steps.completions, TOKEN),
    "translations": (Causal, step_of(steps.translation), steps.translations, TOKEN),
    "weighted rows": (linear, steps.weighted(of_all=True), lambda: numbers(3, with_weights=True), {}),
    "rows, AdamW": (linear, step_of(steps.squared), lambda: numbers(3), {"optimizer": adamw}),
    "rows": (linear, step_of(steps.squared), lambda: numbers(3), SEQUENCE),
    "negatives": (linear, step_of(mean_over_negatives), lambda: numbers(3), {"microbatch_loss": ("negatives",)}),
}
"""Model, step, batch and arguments, by name."""
