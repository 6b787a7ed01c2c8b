"""Communication around a mixture of experts whose hidden features are sharded. Each rank computes a partial sum of the output."""

from __future__ import annotations

import torch


class Region:
    """Communication that a mixture of experts needs under tensor parallelism.

    This base class is for replicated experts, so it communicates nothing.
    """

    def gather_input(self, values: torch.Tensor) -> torch.Tensor:
        """Return the layer's full input on every rank.

        This base class returns `values` unchanged, because they are the full input already.
        """
        return values

    def copy_to_ranks(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the replicated input and router weights unchanged. In backward, their gradients are summed over ranks.

        Megatron calls this "copy to tensor-parallel region". Gradients of router weights need the sum too, because router weights
        multiply partial sums.
        """
        return values, weights

    def reduce_output(self, addend: torch.Tensor) -> torch.Tensor:
        """Reduce `addend`, this rank's partial sum, over ranks to the layer's output.

        This base class returns `addend` unchanged, because it is the full output already.
        """
        return addend

    def bias_on_first_rank(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias that this rank adds to its partial sum: the bias on the first rank, zeros on others.

        The reduced output then contains the bias once. This base class returns the bias unchanged.
        """
        return bias


UNSHARDED = Region()
"""Region of every module that is not sharded."""
