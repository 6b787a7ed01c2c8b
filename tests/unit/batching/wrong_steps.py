"""Wrong steps, each with its model, batch, declarations, and words from its cause. Empty words: nothing proves a cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from unit.batching import objectives, steps
from unit.batching.objectives import with_z_loss
from unit.batching.right_steps import BOTH, SEQUENCE, TOKEN, linear, mean_of
from unit.batching.steps import Batch, Causal, losses, numbers, step_of, summed, tokens

PACKED = {"packing": "position_ids"}
PER_MICROBATCH = "of each microbatch, then the mean over microbatches"
Own = Callable[[Any, Batch], torch.Tensor]
Wrong = tuple[Any, Any, Callable[[], Any], dict[str, Any], str]


def per_microbatch(own: Own, number: Callable[[Batch], torch.Tensor]) -> steps.Step:
    """Mean over each microbatch, then over microbatches."""
    return step_of(lambda model, batch, batches: own(model, batch).sum() / number(batch).clamp(min=1) / len(batches))


def num_labels(batch: Batch) -> torch.Tensor:
    """Labels before the shift."""
    return (batch["labels"] != steps.IGNORED).sum()


def num_predictions(batch: Batch) -> torch.Tensor:
    """Positions with logits for a next token, padding included."""
    return torch.tensor(batch["labels"][:, 1:].numel())


def of_all_tokens(model: Any, batch: Batch) -> torch.Tensor:
    """Losses at ignored labels and padding as well."""
    return losses(model, batch, batch["input_ids"])


def over_boundary(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Labels over the boundary of documents count, and are in the count."""
    return steps.label_over_boundary(model, batch, batches)


def unlabelled() -> Batch:
    """Tokens of which every one has a label."""
    found = tokens()
    return found | {"labels": found["input_ids"].clone()}


def clipped_each(model: Any, batches: list[Batch], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """Mistake: clips after each microbatch."""
    optimizer.zero_grad()
    for batch in batches:
        (losses(model, batch).sum() / summed(steps.count, batches)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def updates_each(model: Any, batches: list[Batch], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """Mistake: an update for each microbatch."""
    for batch in batches:
        optimizer.zero_grad()
        (losses(model, batch).sum() / summed(steps.count, batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class AbsolutePositions(Causal):
    """Positions are columns, whatever the padding."""

    def positions_of(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Columns."""
        return torch.arange(input_ids.shape[1]).expand_as(attention_mask)


class MixedRows(Causal):
    """Logits minus half their mean over the microbatch."""

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Logits."""
        logits = super().forward(*arguments, **keywords)
        return logits - 0.5 * logits.mean((0, 1), keepdim=True)


def pooled(how: str) -> steps.Step:
    """Squared errors of rewards, from outputs that padding moves."""
    return mean_of(
        lambda model, batch: (objectives.pooled_rewards(model, batch, how=how) - batch["rewards"]).square(), steps.num_rows
    )


def evaluate_by_rows(model: Any, batches: list[Batch]) -> float:
    """Mistake: batches count by their rows."""
    means = [losses(model, batch).sum() / steps.count(batch).clamp(min=1) * len(batch["labels"]) for batch in batches]
    return float(sum(means) / summed(steps.num_rows, batches))


def contrastive_mean(model: Any, batch: Any, _: list[Any]) -> torch.Tensor:
    """Mistake: a contrastive loss for each microbatch, summed."""
    return steps.contrastive(model, batch, [batch])


FURTHER: dict[str, Wrong] = {
    "constant factor": (
        Causal,
        step_of(lambda model, batch, batches: losses(model, batch).sum() / summed(steps.count, batches) / 2),
        tokens,
        TOKEN,
        "a constant factor 0.5",
    ),
    "masked KD divided by all positions": (
        Causal,
        mean_of(objectives.distillation_losses, num_predictions),
        objectives.distillation,
        TOKEN,
        "mean over the positions except the first of each row, padding included, of all microbatches",
    ),
    "count of attended tokens": (
        Causal,
        mean_of(losses, lambda batch: batch["attention_mask"].sum()),
        tokens,
        TOKEN,
        "mean over the tokens, ignored ones included, of all microbatches",
    ),
    "clipped after each microbatch": (
        Causal,
        clipped_each,
        tokens,
        TOKEN,
        "gradients of the model's outputs agree, but the step changes those of parameters after backward",
    ),
    "an update for each microbatch": (Causal, updates_each, tokens, TOKEN, "the optimizer makes 2 steps with 2 microbatches"),
    "rewards from the last position": (Causal, pooled("end"), objectives.rewards, SEQUENCE, "padding counts in the loss"),
    "rewards from the mean over positions": (Causal, pooled("mean"), objectives.rewards, SEQUENCE, "padding counts in the loss"),
    "advantages relative to the microbatch": (
        Causal,
        mean_of(
            lambda model, batch: objectives.policy_losses(model, batch, objectives.whitened(batch)), objectives.num_completion
        ),
        objectives.policies,
        TOKEN,
        "rows in a microbatch share a loss term, or the loss has parts with different normalisers",
    ),
    "z-loss: mean per microbatch": (
        Causal,
        step_of(with_z_loss(of_all=False)),
        tokens,
        TOKEN,
        f"two parts of the loss have different normalisers, and one is the mean over the counted tokens {PER_MICROBATCH}",
    ),
    "KD per microbatch, next to a right loss": (
        Causal,
        step_of(
            lambda model, batch, batches: (
                losses(model, batch).sum() / summed(steps.count, batches)
                + objectives.distillation_losses(model, batch).sum() / steps.count(batch).clamp(min=1) / len(batches)
            )
        ),
        objectives.distillation,
        TOKEN,
        f"output of call 2: mean over the counted tokens {PER_MICROBATCH}",
    ),
    "rows mixed by the model": (
        MixedRows,
        steps.token_mean,
        tokens,
        TOKEN,
        "rows in a microbatch influence each other in the model",
    ),
    "eval weighted by rows": (
        Causal,
        steps.token_mean,
        tokens,
        TOKEN | {"evaluate": evaluate_by_rows},
        "the evaluation weights the batches' results by rows",
    ),
    "eval of the last batch": (
        Causal,
        steps.token_mean,
        tokens,
        TOKEN | {"evaluate": lambda model, batches: steps.evaluate(model, batches[-1:])},
        "the evaluation is that of the last batch only",
    ),
    "mask ignored": (
        lambda: Causal(uses_mask=False),
        steps.token_mean,
        tokens,
        BOTH,
        "the model attends to padding",
    ),
    "only the last loss returned": (
        Causal,
        steps.returns_last_loss,
        tokens,
        TOKEN,
        "gradients and parameters agree: only the loss that your step returns differs",
    ),
    "no label": (
        Causal,
        step_of(
            lambda model, batch, batches: (
                steps.masked(model, batch, batches) * (batch["completion_mask"].sum() / batch["completion_mask"].sum())
            )
        ),
        steps.completions,
        TOKEN,
        "a microbatch without counted labels makes gradients NaN",
    ),
    "mean of a row without labels": (
        Causal,
        mean_of(
            lambda model, batch: losses(model, batch).sum(1) / (batch["labels"][:, 1:] != steps.IGNORED).sum(1), steps.num_rows
        ),
        tokens,
        SEQUENCE,
        "gradients and parameters agree: only the loss that your step returns differs",
    ),
}
"""Further wrong steps."""

WITHOUT_CAUSE: dict[str, Wrong] = {
    "count of the first microbatch": (
        Causal,
        step_of(lambda model, batch, batches: losses(model, batch).sum() / steps.count(batches[0]).clamp(min=1) / len(batches)),
        tokens,
        TOKEN,
        "",
    ),
    "square root of the count": (Causal, mean_of(losses, lambda batch: steps.count(batch).double().sqrt()), tokens, TOKEN, ""),
    "weights relative to the microbatch": (
        linear,
        step_of(
            lambda model, batch, batches: (
                (functional.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1) * batch[1][:, 0].abs()).sum()
                / batch[1][:, 0].abs().mean()
                / sum(len(each[0]) for each in batches)
            )
        ),
        lambda: numbers(3),
        SEQUENCE,
        "",
    ),
}
"""Wrong steps whose cause nothing proves."""
