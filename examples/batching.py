"""A training step with gradient accumulation, over the same examples in other batches.

The step is wrong on purpose: it takes the mean over the tokens of each microbatch, then the mean over microbatches, so tokens in
short microbatches count more. Run it with ``equivcheck batching examples/batching.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import equivcheck

VOCABULARY, WIDTH, ROWS, LENGTH, IGNORED = 11, 8, 4, 10, -100


def build() -> nn.Module:
    """Model from tokens to logits."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))


def step(model: nn.Module, microbatches: list[dict[str, torch.Tensor]], optimizer: torch.optim.Optimizer, _loss: Any) -> None:
    """Accumulate gradients over microbatches, and update."""
    optimizer.zero_grad()
    for batch in microbatches:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        (loss / len(microbatches)).backward()
    optimizer.step()


tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
batching = equivcheck.Batching(
    model=build,
    step=step,
    batch={"input_ids": tokens, "labels": tokens.clone()},
    normaliser="token",
)


def main() -> None:
    """Print the verdict."""
    print(batching.check())


if __name__ == "__main__":
    main()
