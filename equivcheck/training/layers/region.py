"""How values come to what ranks may have parts of, and go on from it, where each rank computes an addend of the output."""

from __future__ import annotations

import torch


class Region:
    """Each rank has all of it, so that nothing is moved; a parallelism that cuts it has a class of its own."""

    def entered(self, values: torch.Tensor) -> torch.Tensor:
        """The whole input, which every rank has and computes alike with."""
        return values

    def used(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What every rank has, as each computes an addend with it: the gradients are sums over ranks.

        Those of the weights too, which multiply addends, before or after what is linear in them.
        """
        return values, weights

    def left(self, addend: torch.Tensor) -> torch.Tensor:
        """What the addends of all ranks make, as the layer leaves it."""
        return addend

    def added_once(self, bias: torch.Tensor) -> torch.Tensor:
        """A bias of what all addends make, as it is added to that of a rank."""
        return bias


UNCUT = Region()
"""What every module starts with."""
