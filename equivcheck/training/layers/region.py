"""Communication around experts whose hidden features are sharded, so that each rank computes a partial sum of the output."""

from __future__ import annotations

import torch


class Region:
    """Collectives around experts under tensor parallelism.

    This class calls no collectives, because its experts are replicated.
    """

    def gather_input(self, values: torch.Tensor) -> torch.Tensor:
        """Make the input replicated."""
        return values

    def copy_to_ranks(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass on replicated values and router weights to a rank's partial sum; backward sums their gradients over ranks.

        Megatron calls this "copy to tensor-parallel region". Router weights need the sum too, because they multiply partial sums.
        """
        return values, weights

    def reduce_output(self, addend: torch.Tensor) -> torch.Tensor:
        """Reduce the partial sums to the layer's output."""
        return addend

    def bias_on_first_rank(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias that a rank adds to its partial sum, so that the reduced output contains the bias once."""
        return bias


UNSHARDED = Region()
"""Region of every module that is not sharded."""
