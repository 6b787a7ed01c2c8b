"""Of tables that `torch.vmap` goes over with their tokens, backward from outside honours the padding in the first alone.

The rule for copies looks all of them up in one long table, by tokens moved to each copy's rows, and hands the padding on as it
is: a row of the first. Where gradients are taken inside (`torch.func.grad`), each is that of its own lookup.

    python mapped_embedding_padding.py

Exit code 1 where it shows. Seen on torch 2.9.1, 2.13.0 and 2.15.0, CPU; not reported yet, as far as a search of issues tells.
"""

import sys

import torch
from torch.nn import functional

COPIES, PADDING = 3, 1


def looked_up(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of tokens, that of the padding among them."""
    return functional.embedding(tokens, table, padding_idx=PADDING).sum()


def max_difference(*, inside: bool = False) -> float:
    """Of the gradients of the padding's row, which are zero, over all copies."""
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
