"""Under `torch.vmap` over the weight, backward ignores an embedding's `padding_idx` in every copy except the first.

The batching rule concatenates all weights and shifts the tokens to each copy's rows, but passes `padding_idx` unchanged, so it
names a row in the first copy. Inside `torch.func.grad` each gradient is correct.

    python mapped_embedding_padding.py

Exit code 1 if the bug shows. Seen on torch 2.9.1, 2.13.0 and 2.15.0, CPU; not reported yet.
"""

import sys

import torch
from torch.nn import functional

COPIES, PADDING = 3, 1


def looked_up(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sum of the embeddings of the tokens, including the padding token."""
    return functional.embedding(tokens, table, padding_idx=PADDING).sum()


def max_difference(*, inside: bool = False) -> float:
    """Largest gradient of the padding row over all copies; it should be zero."""
    tables, tokens = torch.ones(COPIES, 3, 2, requires_grad=True), torch.tensor([[0, 1, 2]] * COPIES)
    if inside:
        gradients = torch.vmap(torch.func.grad(looked_up))(tables.detach(), tokens)
    else:
        torch.vmap(looked_up)(tables, tokens).sum().backward()
        gradients = tables.grad
    return gradients[:, PADDING].abs().max().item()


if __name__ == "__main__":
    found = max_difference()
    print(f"max difference {found}")
    sys.exit(found > 0)
