"""The modules of a plan on plain tensors: each has its part of a linear or embedding, and moves activations around it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from equivcheck.layouts.base.plan.linears import ActivationPlacement
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.layouts.parallelisms.local_tensor_parallel.routes import Route


class LocalLinear(nn.Module):
    """This rank's part of a linear, cut along a dim of its weight and one of its bias, between two moves."""

    def __init__(
        self, full: nn.Linear, ranks: AxisRanks, enter: Route, leave: Route, dims: tuple[int | None, int | None]
    ) -> None:
        super().__init__()
        self.ranks, self.enter, self.leave = ranks, enter, leave
        self.weight = ranks.own_parameter(full.weight, dims[0])
        self.bias = None if full.bias is None else ranks.own_parameter(full.bias, dims[1])
        whole, output = ActivationPlacement.WHOLE, leave.target
        self.cut_bias = Route(
            source=whole, target=output, gradient_source=output, gradient_target=whole, features=full.out_features
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map an activation that lies as the layer before left it to one that lies as the layer after wants it."""
        entered = self.ranks.move(inputs, self.enter)
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if self.enter.target is ActivationPlacement.ROWS:
            weight = self.ranks.used_by_all(weight)
            bias = None if bias is None else self.ranks.used_by_all(bias)
        if bias is None or self.leave.source is not ActivationPlacement.PENDING:
            return self.ranks.move(functional.linear(entered, weight, bias), self.leave)
        # Added to addends, it would be added once for each rank.
        return self.ranks.move(functional.linear(entered, weight), self.leave) + self.bias_of_output(bias)

    def bias_of_output(self, bias: torch.Tensor) -> torch.Tensor:
        """A bias that each rank has whole, as it is added to an output."""
        if self.leave.target is ActivationPlacement.ROWS:
            return self.ranks.used_by_all(bias)
        return self.ranks.move(bias, self.cut_bias)


class LocalNorm(nn.Module):
    """A norm of this rank's rows."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, ranks: AxisRanks) -> None:
        super().__init__()
        self.weight, self.ranks = norm.weight, ranks
        self.bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        self.is_centred, self.shape, self.eps = isinstance(norm, nn.LayerNorm), list(norm.normalized_shape), norm.eps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map rows to rows."""
        weight = self.ranks.used_by_all(self.weight)
        if not self.is_centred:
            return functional.rms_norm(inputs, self.shape, weight, self.eps)
        bias = None if self.bias is None else self.ranks.used_by_all(self.bias)
        assert self.eps is not None, "a layer norm has one"
        return functional.layer_norm(inputs, self.shape, weight, bias, self.eps)


class LocalEmbedding(nn.Module):
    """This rank's rows, or features, of an embedding; or all of it, whose output is moved."""

    def __init__(self, full: nn.Embedding, ranks: AxisRanks, leave: Route, dim: int | None) -> None:
        super().__init__()
        self.ranks, self.leave, self.padding_idx = ranks, leave, full.padding_idx
        self.weight = ranks.own_parameter(full.weight, dim)
        self.start = ranks.first(full.num_embeddings) if dim == 0 else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens to what they are embedded as."""
        if self.start is None:
            return self.ranks.move(functional.embedding(tokens, self.weight, self.padding_idx), self.leave)
        return self.ranks.move(self.own_tokens(tokens, self.start), self.leave)

    def own_tokens(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Zeros for the tokens of other ranks: they are looked up in a row after those of this one."""
        num_rows, own = self.weight.shape[0], tokens - start
        own = torch.where((own >= 0) & (own < num_rows), own, num_rows)
        rows = torch.cat([self.weight, self.weight.new_zeros(1, self.weight.shape[1])])
        padding = -1 if self.padding_idx is None else self.padding_idx - start
        return functional.embedding(own, rows, padding if 0 <= padding < num_rows else None)
