"""Modules with sharded plain tensors, and how they replace a model's modules.

Each module holds its part of a linear or embedding and redistributes activations before and after it. A layer that computes
partial sums, such as experts sharded by hidden features, is a region: all ranks choose the same experts, and the output is summed
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivcheck.layouts.base.plan.linears import ActivationPlacement
from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import (
    COPY_TO_PARTIAL,
    PlannedModule,
    Redistribution,
    planned_modules,
    planned_regions,
)
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks
from equivcheck.scenario import Collectives, LocalTensorParallel, Split
from equivcheck.training.layers.region import Region
from equivcheck.training.model import share_weights, tie_head
from equivcheck.training.setup import Setup


class LocalLinear(nn.Module):
    """This rank's shard of a linear layer, with a redistribution before it and one after it."""

    def __init__(
        self, full: nn.Linear, ranks: AxisRanks, enter: Redistribution, leave: Redistribution, dims: tuple[int | None, int | None]
    ) -> None:
        super().__init__()
        self.ranks, self.enter, self.leave = ranks, enter, leave
        self.weight = ranks.own_parameter(full.weight, dims[0])
        self.bias = None if full.bias is None else ranks.own_parameter(full.bias, dims[1])
        whole, output = ActivationPlacement.REPLICATED, leave.target
        self.cut_bias = Redistribution(
            source=whole, target=output, gradient_source=output, gradient_target=whole, features=full.out_features
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Redistribute the input, apply the linear, and redistribute the output."""
        entered = self.ranks.move(inputs, self.enter)
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if self.enter.target is ActivationPlacement.ROWS:
            weight = self.ranks.copy_to_region(weight)
            bias = None if bias is None else self.ranks.copy_to_region(bias)
        if bias is None or self.leave.source is not ActivationPlacement.PARTIAL:
            return self.ranks.move(functional.linear(entered, weight, bias), self.leave)
        # If each rank added the bias to its partial sum, the output would have it once for each rank.
        return self.ranks.move(functional.linear(entered, weight), self.leave) + self.bias_of_output(bias)

    def bias_of_output(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the part of a replicated bias that this rank adds to the redistributed output."""
        if self.leave.target is ActivationPlacement.ROWS:
            return self.ranks.copy_to_region(bias)
        return self.ranks.move(bias, self.cut_bias)


class LocalNorm(nn.Module):
    """Norm layer on this rank's rows."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, ranks: AxisRanks) -> None:
        super().__init__()
        self.weight, self.ranks = norm.weight, ranks
        self.bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        self.is_centred, self.shape, self.eps = isinstance(norm, nn.LayerNorm), list(norm.normalized_shape), norm.eps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's rows."""
        weight = self.ranks.copy_to_region(self.weight)
        if not self.is_centred:
            return functional.rms_norm(inputs, self.shape, weight, self.eps)
        bias = None if self.bias is None else self.ranks.copy_to_region(self.bias)
        assert self.eps is not None, "a layer norm has one"
        return functional.layer_norm(inputs, self.shape, weight, bias, self.eps)


class LocalEmbedding(nn.Module):
    """This rank's shard of an embedding, sharded by tokens or by features, or a replicated embedding.

    It redistributes its output.
    """

    def __init__(self, full: nn.Embedding, ranks: AxisRanks, leave: Redistribution, dim: int | None) -> None:
        super().__init__()
        self.ranks, self.leave, self.padding_idx = ranks, leave, full.padding_idx
        self.weight = ranks.own_parameter(full.weight, dim)
        self.start = ranks.first_index(full.num_embeddings) if dim == 0 else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up the tokens' embeddings, and redistribute them."""
        if self.start is None:
            return self.ranks.move(functional.embedding(tokens, self.weight, self.padding_idx), self.leave)
        return self.ranks.move(self.own_tokens(tokens, self.start), self.leave)

    def own_tokens(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Look up tokens in this rank's shard. Tokens on other ranks get rows of zeros."""
        num_rows, own = self.weight.shape[0], tokens - start
        own = torch.where((own >= 0) & (own < num_rows), own, num_rows)
        rows = torch.cat([self.weight, self.weight.new_zeros(1, self.weight.shape[1])])
        padding = -1 if self.padding_idx is None else self.padding_idx - start
        return functional.embedding(own, rows, padding if 0 <= padding < num_rows else None)


class LocalRegion(Region):
    """Part of a layer, with the collectives around it. Each rank computes a partial sum of this part's output."""

    def __init__(self, ranks: AxisRanks, enter: Redistribution, use: Redistribution, leave: Redistribution) -> None:
        self.ranks, self.enter, self.use, self.leave = ranks, enter, use, leave

    def gather_input(self, values: torch.Tensor) -> torch.Tensor:
        """Redistribute the region's input to all ranks in full."""
        return self.ranks.move(values, self.enter)

    def copy_to_ranks(self, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and routing weights unchanged; backward sums their gradients over ranks."""
        return self.ranks.move(values, self.use), self.ranks.move(weights, self.use)

    def reduce_output(self, addend: torch.Tensor) -> torch.Tensor:
        """Sum the partial sums over ranks, and give the sum the placement of the layer's output."""
        return self.ranks.move(addend, self.leave)

    def bias_on_first_rank(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias on the first rank and zeros on other ranks. The sum over ranks then contains it once."""
        return self.ranks.bias_on_first_rank(bias)


def shard_region(layer: Any, region: LocalRegion, dims: Mapping[str, int]) -> None:
    """Shard the parameters named in `dims` along these dims, and let the layer compute partial sums."""
    layer.region = region
    for name, dim in dims.items():
        owner, _, attribute = name.rpartition(".")
        module = layer.get_submodule(owner)
        module.region = region
        setattr(module, attribute, region.ranks.own_parameter(getattr(module, attribute), dim))


def replace_modules(setup: Setup, parallelism: LocalTensorParallel, mesh: DeviceMesh) -> AxisRanks:
    """Replace or shard every module in the plan. Return the `AxisRanks` that redistribute the modules' activations."""
    ranks = _kind(parallelism.collectives)(group=mesh.get_group(), size=mesh.size(), index=mesh.get_local_rank())
    model = setup.training.model
    for planned in planned_modules(model, parallelism):
        setup.model.set_submodule(planned.name, _replaced(setup.model.get_submodule(planned.name), planned, ranks))
    for region in planned_regions(model, parallelism):
        moves = LocalRegion(ranks, region.enter, COPY_TO_PARTIAL, region.leave)
        shard_region(setup.model.get_submodule(f"layers.{region.layer}"), moves, dict(region.dims))
    share_weights(setup.model, model)
    if model.head is not None and model.head.tied and parallelism.head is not Split.NOT_IN_PLAN:
        tie_head(setup.model)
    return ranks


def _kind(collectives: Collectives) -> type[AxisRanks]:
    """Return the class for the collectives. spmd_types is an optional dependency, so it is imported only on request."""
    if collectives is Collectives.FUNCTIONAL:
        return AxisRanks
    from equivcheck.layouts.parallelisms.local_tensor_parallel.typed_regions import TypedRanks

    return TypedRanks


def _replaced(full: nn.Module, planned: PlannedModule, ranks: AxisRanks) -> nn.Module:
    if isinstance(full, nn.Embedding):
        assert planned.leave is not None, planned
        return LocalEmbedding(full, ranks, planned.leave, planned.dims[0])
    if isinstance(full, nn.Linear):
        assert planned.enter is not None, planned
        assert planned.leave is not None, planned
        return LocalLinear(full, ranks, planned.enter, planned.leave, planned.dims)
    assert isinstance(full, (nn.LayerNorm, nn.RMSNorm)), full
    return LocalNorm(full, ranks)
