"""Where two honest runs that round alike may still differ: in the order of a sum, and now and then in one rounding.

Ranks add up in an order of their own. A value that has come out one unit in the last place elsewhere is now and then cast to the
neighbour of what it would have been cast to: from float32 to bfloat16 in one of some ten thousand casts. A copy of the reference
that does both shows how far that moves each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

RARE: Final = 1e-10
"""Chance of a flip, for an error of one unit in the last place, below which none is expected in a million of scenarios."""


class Jitter:
    """None at all: the reference itself."""

    def begin(self, step: int) -> None:
        """Told of each step."""

    def ordered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The order in which gradients are added up."""
        return parts

    def rounded(self, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - for those that need it
        """What the rounding of a computed tensor comes out as."""
        return rounded

    def flip(self, cast: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
        """May change parameters that have been cast, in place."""


class Shuffled(Jitter):
    """Sums in another order: round a ring upwards and downwards, from each rank, and then in random ones.

    gloo goes downwards: each rank ends with its own part.
    """

    def __init__(self, generator: np.random.Generator, copy: int) -> None:
        """`copy` counts from 1."""
        self.generator, self.copy = generator, copy

    def ordered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """An order of this copy's."""
        size = len(parts)
        if self.copy < 2 * size:
            start, ring = self.copy % size, parts if self.copy < size else parts[::-1]
            return ring[start:] + ring[:start]
        return [parts[index] for index in self.generator.permutation(len(parts))]


class PerturbedRounding(Shuffled):
    """Moreover one element of what is rounded goes to its neighbour, of parameters from the second step on.

    At the first step all ranks cast the same bits.
    """

    def __init__(self, generator: np.random.Generator, copy: int, precision: str, to: str) -> None:
        """`precision` is that of the training, `to` what parameters are cast to; types by name."""
        super().__init__(generator, copy)
        self.precision: torch.dtype = getattr(torch, precision)
        self.to: torch.dtype = getattr(torch, to)
        self.step = 0

    def begin(self, step: int) -> None:
        """Keep the step."""
        self.step = step

    def rounded(self, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """One element flipped, unless the exact one is of a low precision itself: equal bits round equally."""
        if exact.dtype in (torch.float32, torch.float64) and _may_flip(exact.dtype, rounded.dtype):
            self._flip_one(rounded.detach(), rounded.dtype)
        return rounded

    def flip(self, cast: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
        """One element of one trained parameter."""
        if self.step and _may_flip(self.precision, self.to):
            # Autocast casts no norm's weights; with any other casts a matrix tells most.
            names = [name for name, master in masters.items() if master.requires_grad and ".norm." not in name]
            sizes = np.array([masters[name].numel() for name in names])
            if names:
                self._flip_one(cast[names[self.generator.choice(len(names), p=sizes / sizes.sum())]].detach(), self.to)

    def _flip_one(self, values: torch.Tensor, kind: torch.dtype) -> None:
        """Move one element to a neighbour in that element type."""
        if values.numel():
            position = tuple(int(self.generator.integers(size)) for size in values.shape)
            values[position] *= 1.0 + float(self.generator.choice((-1.0, 1.0))) * torch.finfo(kind).eps


def _may_flip(exact: torch.dtype, rounded: torch.dtype) -> bool:
    return RARE < torch.finfo(exact).eps / torch.finfo(rounded).eps < 1.0
