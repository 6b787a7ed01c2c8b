"""Objectives of fine-tuning next to cross-entropy: several heads, preferences, policies, distillation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from unit.batching.steps import (
    IGNORED,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Batch,
    Causal,
    count,
    losses,
    summed,
    tokens,
)

Part = Callable[[Any, Batch, list[Batch]], torch.Tensor]


class TwoHeads(Causal):
    """A second head predicts the token after the next one."""

    def __init__(self, **keywords: bool) -> None:
        super().__init__(**keywords)
        self.second = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Logits for the next token, and for the one after it."""
        logits = super().forward(*arguments, **keywords)
        return logits, self.second(self.hidden)


def second_labels(batch: Batch) -> torch.Tensor:
    """Labels two positions later. They count if the tokens between them and their position belong to the same document."""
    labels = batch["labels"][:, 2:].clone()
    if "position_ids" in batch:
        labels[batch["position_ids"][:, 2:] < 2] = IGNORED
    if "attention_mask" in batch:
        labels[batch["attention_mask"][:, :-2] == 0] = IGNORED
    return labels


def any_second_labels(batch: Batch) -> torch.Tensor:
    """Mistake: labels two positions later, whatever is between."""
    return batch["labels"][:, 2:]


def with_second_head(
    *, of_all: bool = True, labels_of: Callable[[Batch], torch.Tensor] = second_labels, shares_count: bool = False
) -> Part:
    """Mean over the tokens of each head, of all microbatches or of each. `shares_count`: both have the first head's count."""

    def first_labels(batch: Batch) -> torch.Tensor:
        labels = batch["labels"][:, 1:].clone()
        if "attention_mask" in batch:
            labels[batch["attention_mask"][:, :-1] == 0] = IGNORED
        return labels

    def loss_of(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
        given = {name: batch[name] for name in ("attention_mask", "position_ids", "document_ids") if name in batch}
        outputs = model(batch["input_ids"], **given)
        total = torch.zeros(())
        for number, (logits, get, factor) in enumerate(zip(outputs, (first_labels, labels_of), (1.0, 0.3), strict=True)):
            own = functional.cross_entropy(
                logits[:, : -1 - number].flatten(0, 1), get(batch).flatten(), ignore_index=IGNORED, reduction="sum"
            )
            counted = first_labels if shares_count else get

            def number_of(each: Batch, counted: Any = counted) -> torch.Tensor:
                return (counted(each) != IGNORED).sum()

            divisor = summed(number_of, batches) if of_all else number_of(batch).clamp(min=1) * len(batches)
            total = total + factor * own / divisor
        return total

    return loss_of


def with_z_loss(*, of_padding: bool = False, of_all: bool = True) -> Part:
    """Mean over tokens, and the squared log of each position's normaliser; `of_padding`: at all positions."""

    def loss_of(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
        given = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
        logits = model(batch["input_ids"], **given)[:, :-1]
        targets = batch["labels"][:, 1:]
        own = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        kept = torch.ones_like(targets) if of_padding else (targets != IGNORED).long()
        squares = (logits.logsumexp(-1).square() * kept).sum()
        number = summed(count, batches)
        divisor = number if of_all else count(batch).clamp(min=1) * len(batches)
        return own / number + 0.1 * squares / divisor

    return loss_of


def preferences() -> Batch:
    """Pairs of a chosen and a rejected answer, with a reference model's difference."""
    generator = torch.Generator().manual_seed(2)
    found: Batch = {}
    lengths = {"chosen": (7, 5, 9, 4), "rejected": (6, 8, 5, 4)}
    for name, ends in lengths.items():
        mask = (torch.arange(LENGTH) < torch.tensor(ends)[:, None]).long()
        found[f"{name}_input_ids"] = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator) * mask
        found[f"{name}_attention_mask"] = mask
        labels = found[f"{name}_input_ids"].where((mask == 1) & (torch.arange(LENGTH) > 1), torch.tensor(IGNORED))
        found[f"{name}_labels"] = labels
    found["reference_margins"] = torch.randn(ROWS, generator=generator)
    return found


def log_probabilities(model: Any, batch: Batch, name: str, *, of_padding: bool = False) -> torch.Tensor:
    """Sum over each row's counted tokens."""
    part = {key.removeprefix(f"{name}_"): value for key, value in batch.items() if key.startswith(name)}
    if of_padding:
        part["labels"] = part["input_ids"]
    return -losses(model, part).sum(1)


def preference_losses(model: Any, batch: Batch, *, of_padding: bool = False) -> torch.Tensor:
    """DPO's loss for each pair."""
    chosen, rejected = (log_probabilities(model, batch, name, of_padding=of_padding) for name in ("chosen", "rejected"))
    return -functional.logsigmoid(0.3 * (chosen - rejected - batch["reference_margins"]))


def num_pairs(batch: Batch) -> torch.Tensor:
    """Number of pairs."""
    return torch.tensor(len(batch["chosen_input_ids"]))


def num_chosen(batch: Batch) -> torch.Tensor:
    """Counted tokens in chosen answers."""
    return (batch["chosen_labels"][:, 1:] != IGNORED).sum()


def policies() -> Batch:
    """Prompts with completions, their advantages and the old policy's log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(LENGTH) < torch.tensor([[7], [5], [10], [9]])).long()
    completion = mask * (torch.arange(LENGTH) >= torch.tensor([[2], [3], [1], [4]])).long()
    return {
        "input_ids": torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator) * mask,
        "attention_mask": mask,
        "completion_mask": completion,
        "old_logps": -2.0 - torch.rand(ROWS, LENGTH, generator=generator),
        "advantages": torch.randn(ROWS, generator=generator),
    }


def policy_losses(model: Any, batch: Batch, advantages: torch.Tensor | None = None) -> torch.Tensor:
    """The clipped loss at each position but the first, 0 outside completions."""
    logits = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
    own = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    ratios = torch.exp(own - batch["old_logps"][:, 1:])
    gains = (batch["advantages"] if advantages is None else advantages)[:, None]
    found = -torch.minimum(ratios * gains, ratios.clamp(0.5, 1.5) * gains)
    return found * batch["completion_mask"][:, 1:]


def num_completion(batch: Batch) -> torch.Tensor:
    """Tokens in completions."""
    return batch["completion_mask"][:, 1:].sum()


def completion_means(model: Any, batch: Batch) -> torch.Tensor:
    """Each row's mean over its completion."""
    return policy_losses(model, batch).sum(1) / batch["completion_mask"][:, 1:].sum(1).clamp(min=1)


def whitened(batch: Batch) -> torch.Tensor:
    """Mistake: advantages relative to the microbatch."""
    values = batch["advantages"]
    return (values - values.mean()) / (values.std(unbiased=False) + 0.1)


def distillation() -> Batch:
    """Tokens with a teacher's logits."""
    generator = torch.Generator().manual_seed(4)
    return tokens() | {"teacher_logits": torch.randn(ROWS, LENGTH, VOCABULARY, generator=generator)}


def distillation_losses(model: Any, batch: Batch, *, of_padding: bool = False) -> torch.Tensor:
    """KL divergence from the teacher at each position but the last, 0 if its label is ignored."""
    logits = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
    teacher = batch["teacher_logits"][:, :-1].log_softmax(-1)
    own = functional.kl_div(logits.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1)
    return own if of_padding else own * (batch["labels"][:, 1:] != IGNORED)


def pooled_rewards(model: Any, batch: Batch, *, how: str = "last") -> torch.Tensor:
    """One number for each row: from the last token, from the last position, or the mean over all positions."""
    logits = model(batch["input_ids"], batch["attention_mask"])
    if how == "mean":
        logits = logits.mean(1, keepdim=True)
    ends = batch["attention_mask"].sum(1) - 1 if how == "last" else torch.full((len(logits),), logits.shape[1] - 1)
    found: torch.Tensor = logits[torch.arange(len(logits)), ends, 0]
    return found


def rewards() -> Batch:
    """Rows with a number to predict."""
    generator = torch.Generator().manual_seed(5)
    found = policies()
    targets = torch.randn(ROWS, generator=generator)
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "rewards": targets}
