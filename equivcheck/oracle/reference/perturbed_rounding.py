"""Differences between two correct runs with the same casts: summation order, and single roundings.

Ranks add in their own order. If a value is off by one unit in the last place, a cast may round it to the neighbouring value: from
float32 to bfloat16 about once in 10,000 casts. A reference copy with both effects shows how far they move each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

RARE: Final = 1e-10
"""Chance of a flipped rounding. If it is smaller, no flip is expected in a million scenarios."""


class Jitter:
    """Base class for changes to summation order and rounding in copies of the reference. This class itself changes nothing."""

    def begin(self, step: int) -> None:
        """Prepare for the step with this number. The base class does nothing."""

    def ordered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients from all ranks in the order in which they are added. The base class keeps the order."""
        return parts

    def rounded(self, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - used by overriding methods
        """Return `rounded`, which subclasses may change. `exact` holds the values before rounding."""
        return rounded

    def flip(self, cast: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
        """Change cast parameters in place. `masters` holds the parameters before the cast. The base class changes nothing."""


class Shuffled(Jitter):
    """Changes only the order in which gradients from several ranks are added.

    The first copies add in ring order, and each copy begins at another rank. Their order is first ascending, then descending.
    Later copies add in random order. gloo adds in descending order, and each rank adds its own part last.
    """

    def __init__(self, generator: np.random.Generator, copy: int) -> None:
        """`copy` is the number of the perturbed run, from 1."""
        self.generator, self.copy = generator, copy

    def ordered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients from all ranks in the order in which this copy adds them."""
        size = len(parts)
        if self.copy < 2 * size:
            start, ring = self.copy % size, parts if self.copy < size else parts[::-1]
            return ring[start:] + ring[:start]
        return [parts[index] for index in self.generator.permutation(len(parts))]


class PerturbedRounding(Shuffled):
    """Changes the order in which gradients are added, and one element in each rounded tensor.

    Parameters are changed from the second step on, because all ranks cast the same bits at the first step.
    """

    def __init__(self, generator: np.random.Generator, copy: int, precision: str, to: str) -> None:
        """`precision` is the training's precision, and `to` the type to which parameters are cast."""
        super().__init__(generator, copy)
        self.precision: torch.dtype = getattr(torch, precision)
        self.to: torch.dtype = getattr(torch, to)
        self.step = 0

    def begin(self, step: int) -> None:
        """Remember the step, because parameters are not changed in the first one."""
        self.step = step

    def rounded(self, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """Change one element in `rounded` by one unit in the last place, if `exact` has a more precise dtype.

        If `exact` is not float32 or float64, nothing is changed, because all correct runs have the same bits before and after
        rounding.
        """
        if exact.dtype in (torch.float32, torch.float64) and _may_flip(exact.dtype, rounded.dtype):
            self._flip_one(rounded.detach(), rounded.dtype)
        return rounded

    def flip(self, cast: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
        """Change one element in one trained parameter in `cast` by one unit in the last place.

        `masters` holds the parameters before the cast. Nothing is changed at the first step, or in parameters of normalization
        layers.
        """
        if self.step and _may_flip(self.precision, self.to):
            # Autocast casts no norm's weights; with any other casts a matrix tells most.
            names = [name for name, master in masters.items() if master.requires_grad and ".norm." not in name]
            sizes = np.array([masters[name].numel() for name in names])
            if names:
                self._flip_one(cast[names[self.generator.choice(len(names), p=sizes / sizes.sum())]].detach(), self.to)

    def _flip_one(self, values: torch.Tensor, kind: torch.dtype) -> None:
        if values.numel():
            position = tuple(int(self.generator.integers(size)) for size in values.shape)
            values[position] *= 1.0 + float(self.generator.choice((-1.0, 1.0))) * torch.finfo(kind).eps


def _may_flip(exact: torch.dtype, rounded: torch.dtype) -> bool:
    return RARE < torch.finfo(exact).eps / torch.finfo(rounded).eps < 1.0
