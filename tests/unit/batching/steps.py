"""Models, batches and steps over them, right and wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, ROWS, IGNORED, WINDOW = 11, 6, 10, 4, -100, 4
Batch = dict[str, Any]
Step = Callable[[Any, list[Any], torch.optim.Optimizer, Any], Any]
LossOf = Callable[[Any, Batch, list[Batch]], torch.Tensor]


class Causal(nn.Module):
    """One layer of causal attention. Each argument leaves out something that batches need."""

    def __init__(self, *, resets_positions: bool = True, separates_documents: bool = True, uses_mask: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.queries, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.router = nn.Linear(WIDTH, 3)
        self.resets_positions, self.separates_documents, self.uses_mask = resets_positions, separates_documents, uses_mask

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits with shape (rows, positions, vocabulary)."""
        length = input_ids.shape[1]
        positions = torch.arange(length).expand_as(input_ids)
        if position_ids is not None and self.resets_positions:
            positions = position_ids
        elif document_ids is not None and self.resets_positions:
            positions = positions - (document_ids[:, :, None] > document_ids[:, None, :]).sum(2)
        elif attention_mask is not None and self.uses_mask:
            positions = self.positions_of(input_ids, attention_mask)
        inputs = self.tokens(input_ids) + self.positions(positions)
        allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(len(input_ids), length, length)
        if attention_mask is not None and self.uses_mask:
            allowed = allowed & attention_mask.bool()[:, None, :]
        if document_ids is None and position_ids is not None:
            document_ids = (position_ids == 0).cumsum(1)
        if document_ids is not None and self.separates_documents:
            allowed = allowed & (document_ids[:, :, None] == document_ids[:, None, :])
        allowed = allowed | torch.eye(length, dtype=torch.bool)
        query, key, value = self.queries(inputs).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
        self.routed = self.router(inputs).softmax(-1)
        self.hidden = torch.tanh(scores.softmax(-1) @ value + inputs)
        logits: torch.Tensor = self.head(self.hidden)
        return logits

    def positions_of(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Positions without padding."""
        return (attention_mask.cumsum(1) - 1).clamp(min=0)


class Normed(nn.Module):
    """Batch norm, so that rows influence each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs with shape (rows, 2)."""
        outputs: torch.Tensor = self.down(torch.tanh(self.norm(self.up(inputs))))
        return outputs


def tokens() -> Batch:
    """Rows of one length, whose labels have their tokens' positions, some ignored."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :3], labels[2, :1] = IGNORED, IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def numbers(num_outputs: int = 2, *, with_weights: bool = False) -> tuple[torch.Tensor, ...]:
    """Five rows of inputs and targets, and weights if asked."""
    generator = torch.Generator().manual_seed(1)
    pair = torch.randn(5, 3, generator=generator), torch.randn(5, num_outputs, generator=generator)
    return (*pair, 0.5 + torch.rand(5, generator=generator)) if with_weights else pair


def count(batch: Batch) -> torch.Tensor:
    """Labels that count."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def losses(model: Any, batch: Batch, labels: torch.Tensor | None = None) -> torch.Tensor:
    """Loss at each position but the last, 0 if its label is ignored."""
    given = {name: batch[name] for name in ("attention_mask", "position_ids", "document_ids") if name in batch}
    logits = model(batch["input_ids"], **given)[:, :-1]
    targets = (batch["labels"] if labels is None else labels)[:, 1:]
    flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(targets.shape)


def step_of(loss_of: LossOf) -> Step:
    """Step that adds up gradients of `loss_of(model, batch, all batches)`."""

    def step(model: Any, batches: list[Any], optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            loss = loss_of(model, batch, batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


def summed(value: Callable[[Batch], torch.Tensor], batches: Sequence[Batch]) -> torch.Tensor:
    """Sum over microbatches."""
    return torch.stack([value(batch) for batch in batches]).sum()


def num_rows(batch: Batch) -> torch.Tensor:
    """Number of rows."""
    return torch.tensor(len(batch["input_ids"]))


def num_positions(batch: Batch) -> torch.Tensor:
    """Number of positions, padding included."""
    return torch.tensor(batch["input_ids"].numel())


def row_means(model: Any, batch: Batch) -> torch.Tensor:
    """Each row's mean over its tokens."""
    return losses(model, batch).sum(1) / (batch["labels"][:, 1:] != IGNORED).sum(1).clamp(min=1)


token_mean = step_of(lambda model, batch, batches: losses(model, batch).sum() / summed(count, batches))
sequence_mean = step_of(lambda model, batch, batches: row_means(model, batch).sum() / summed(num_rows, batches))
token_sum = step_of(lambda model, batch, _: losses(model, batch).sum())


def without_earlier_gradients(model: Any, batches: list[Batch], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """Gradients are set to zero before each microbatch."""
    for batch in batches:
        optimizer.zero_grad()
        (losses(model, batch).sum() / summed(count, batches)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def returns_last_loss(model: Any, batches: list[Batch], optimizer: torch.optim.Optimizer, _loss: Any) -> torch.Tensor:
    """Mistake in the log: the loss is that of the last microbatch."""
    optimizer.zero_grad()
    for batch in batches:
        loss = losses(model, batch).sum() / summed(count, batches)
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def steps_after_full_window(model: Any, batches: list[Batch], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """A last, shorter window makes no step."""
    optimizer.zero_grad()
    for number, batch in enumerate(batches):
        (losses(model, batch).sum() / summed(count, batches)).backward()  # type: ignore[no-untyped-call]
        if (number + 1) % WINDOW == 0:
            optimizer.step()


def label_over_boundary(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Labels are the tokens, except padding."""
    labels = batch["input_ids"].clone()
    if "attention_mask" in batch:
        labels[batch["attention_mask"] == 0] = IGNORED
    return losses(model, batch, labels).sum() / summed(count, batches)


def router_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Sum over squares of the mean router probabilities over a microbatch's tokens."""
    weights = batch["attention_mask"].unsqueeze(-1).to(model.routed)
    shares: torch.Tensor = (model.routed * weights).sum((0, 1)) / weights.sum()
    return shares.square().sum()


def with_router(share: Callable[[list[Batch]], float]) -> Step:
    """Mean over tokens, and a router loss of each microbatch times `share`."""
    return step_of(
        lambda model, batch, batches: (
            losses(model, batch).sum() / summed(count, batches) + router_loss(model, batch) * share(batches)
        )
    )


def weighted(*, of_all: bool) -> Step:
    """Mean over rows with the batch's weights, of all microbatches or of each."""

    def loss_of(model: Any, batch: Any, batches: list[Any]) -> torch.Tensor:
        inputs, targets, weights = batch
        own = ((model(inputs) - targets).square().mean(1) * weights).sum()
        return own / sum(each[2].sum() for each in batches) if of_all else own / weights.sum() / len(batches)

    return step_of(loss_of)


def squared(model: Any, batch: Any, batches: list[Any]) -> torch.Tensor:
    """Squared errors, divided by the number of rows of all microbatches."""
    return (model(batch[0]) - batch[1]).square().sum() / sum(len(each[0]) for each in batches)


def completions() -> Batch:
    """Tokens without labels: a mask selects those with a loss, the first one included."""
    found = tokens()
    mask = (torch.arange(LENGTH) < torch.tensor([[7], [4], [10], [9]])).long()
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "completion_mask": mask}


def masked(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Mean over all tokens in the mask, each with a loss at its own position."""
    logits = model(batch["input_ids"], batch["attention_mask"])
    own = functional.cross_entropy(logits.transpose(1, 2), batch["input_ids"], reduction="none")
    return (own * batch["completion_mask"]).sum() / sum(each["completion_mask"].sum() for each in batches)


def translations() -> Batch:
    """Labels with another length than the tokens."""
    found = tokens()
    labels = found["input_ids"][:, :6].where(torch.arange(6) < torch.tensor([[3], [6], [4], [5]]), torch.tensor(IGNORED))
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}


def translation(model: Any, batch: Batch, batches: list[Batch]) -> torch.Tensor:
    """Mean over all labels, each predicted from the first token."""
    logits = model(batch["input_ids"], batch["attention_mask"])[:, :1].expand(-1, 6, -1)
    own = functional.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED, reduction="sum")
    return own / sum((each["labels"] != IGNORED).sum() for each in batches)


def contrastive(model: Any, batch: Any, batches: list[Any]) -> torch.Tensor:
    """Each row against all rows of its microbatch."""
    one, other = (functional.normalize(model(each)) for each in batch)
    return functional.cross_entropy(one @ other.T, torch.arange(len(one))) * len(one) / sum(len(each[0]) for each in batches)


def evaluate(model: Any, batches: list[Batch]) -> float:
    """Mean over the tokens of all batches."""
    return float(sum(losses(model, batch).sum() for batch in batches) / summed(count, batches))


def evaluate_means(model: Any, batches: list[Batch]) -> float:
    """Mean over batches of each one's mean."""
    return float(sum(losses(model, batch).sum() / count(batch).clamp(min=1) for batch in batches) / len(batches))
