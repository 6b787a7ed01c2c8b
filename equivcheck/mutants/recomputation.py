"""Layers that are computed again for backward, and not as they were."""

from __future__ import annotations

import torch

from equivcheck.mutants.masks import other_mask
from equivcheck.train.model import Block


def draw_again(block: Block) -> None:
    """Let a layer drop what it kept whenever it is given a mask that it has had before: that is when it is computed again."""
    compute, had = block.compute, set[torch.Tensor]()

    def compute_again(inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        if mask is not None and mask in had:
            return compute(inputs, other_mask(mask, block.layer), step)
        if mask is not None:
            had.add(mask)
        return compute(inputs, mask, step)

    block.compute = compute_again  # type: ignore[method-assign]
