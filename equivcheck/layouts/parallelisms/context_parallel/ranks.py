"""The ranks that share out positions, and moves of values between them that differentiate. Values are (..., positions, width)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch.distributed import ProcessGroup
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PositionRanks:
    """A rank among those that share out the positions of sequences."""

    group: ProcessGroup
    """All of them."""
    index: int
    """This rank's place."""
    parts: tuple[torch.Tensor, ...]
    """The positions of each of them, in the order in which it has them."""

    @property
    def own(self) -> torch.Tensor:
        """The positions of this rank."""
        return self.parts[self.index]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.parts)

    @property
    def length(self) -> int:
        """Positions of all ranks together."""
        return sum(map(len, self.parts))

    @property
    def longest(self) -> int:
        """Positions of the rank that has most."""
        return max(map(len, self.parts))

    def slots(self) -> torch.Tensor:
        """Where each position of a sequence lies among parts that are padded to the longest, shape (length,)."""
        found = torch.empty(self.length, dtype=torch.int64)
        for rank, part in enumerate(self.parts):
            found[part] = rank * self.longest + torch.arange(len(part))
        return found


class Gather(torch.autograd.Function):
    """Values of all positions, from those of each rank's own; backward adds up what all ranks have for this rank's own."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: PositionRanks) -> torch.Tensor:
        """Gather, padded to the longest part, and put in order.

        Compiled autograd needs the indices of backward among what is saved for it (torch 2.13: "list index out of range").
        """
        ctx.ranks = ranks
        own = padded(values, ranks.longest).movedim(-2, 0).contiguous()
        gathered = waited(collectives.all_gather_tensor(own, 0, ranks.group))
        ctx.save_for_backward(slots := ranks.slots())
        return gathered.index_select(0, slots).movedim(0, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Reduce and scatter."""
        ranks, gradient = ctx.ranks, gradients[0].movedim(-2, 0)
        padded = gradient.new_zeros((ranks.size * ranks.longest, *gradient.shape[1:])).index_copy(
            0, ctx.saved_tensors[0], gradient
        )
        own = waited(collectives.reduce_scatter_tensor(padded, "sum", 0, ranks.group))
        return own.narrow(0, 0, len(ranks.own)).movedim(0, -2), None


def padded(values: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros after the last position, up to a length."""
    missing = length - values.shape[-2]
    return functional.pad(values, (0, 0, 0, missing)) if missing else values.contiguous()


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective returns, once it is there."""
    wait: Any = collectives.wait_tensor
    found: torch.Tensor = wait(tensor)
    return found
