"""Base classes and building blocks for layer modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from equivcheck.scenario import Activation, AnyLayer, Norm
from equivcheck.scenario.execution import KEPT_PRODUCTS
from equivcheck.training.layers.region import UNSHARDED, Region
from equivcheck.training.layers.sequence import FULL_SEQUENCE, Sequence

Function = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[Activation, Function] = {
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.TANH: torch.tanh,
    Activation.SIGMOID: torch.sigmoid,
    Activation.SILU: functional.silu,
}
"""Every activation except the identity."""


KEEP_PRODUCTS = partial(create_selective_checkpoint_contexts, [getattr(torch.ops.aten, name).default for name in KEPT_PRODUCTS])
"""Contexts for selective activation checkpointing."""


class UninitializedLinear(nn.Linear):
    """Linear without initial values, because its parameters are assigned later."""

    def reset_parameters(self) -> None:
        """Do nothing, because the parameters are replaced, and drawing them would use the process-wide generator."""


class UninitializedEmbedding(nn.Embedding):
    """Embedding without initial values, because its weight is assigned later."""

    def reset_parameters(self) -> None:
        """Do nothing, because the weight is replaced, and drawing it would use the process-wide generator."""


class RoutingLoad(NamedTuple):
    """One layer's routing statistics from its last forward, for the load-balancing loss."""

    balance: float
    """Factor on the layer's load-balancing loss."""
    counts: torch.Tensor
    """Number of positions routed to each expert, in the dtype of the activations.

    The shape is (experts,), or (rows, experts) for a loss that is computed for each sequence."""
    shares: torch.Tensor
    """Router score for each expert, as a share in all scores, summed over positions. The shape is that of `counts`."""


class LayerModule(nn.Module):
    """Base class for layers' modules; subclasses implement `compute`.

    If `document_length` is set, a sequence contains documents of this length. Positions do not attend to other documents.
    """

    def __init__(self, layer: AnyLayer) -> None:
        super().__init__()
        self.layer = layer
        self.sequence: Sequence = FULL_SEQUENCE
        self.document_length: int | None = None
        self.recomputes = False
        self.keeps_products = False
        self.offloads = False

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Compute the layer. Inputs have shape (rows, inputs) or (rows, length, inputs); in outputs, only the last dim differs.

        With activation checkpointing, backward computes the layer's activations again.
        """
        if self.offloads:
            with save_on_cpu():
                return self.compute(inputs, mask, step)
        if not self.recomputes:
            return self.compute(inputs, mask, step)
        # Other layers pass no context_fn, because dynamo cannot trace it.
        options: dict[str, Any] = {"context_fn": KEEP_PRODUCTS} if self.keeps_products else {}
        outputs: torch.Tensor = checkpoint(self.compute, inputs, mask, step, use_reentrant=False, **options)
        return outputs

    def use_rank_implementation(self) -> None:
        """Switch to the operations that only ranks use. The base class does nothing.

        It is called on each rank before any parallelism is applied.
        """

    def chooser(self) -> nn.Module | None:
        """Return the router, whose first output says which experts are selected; None if the layer has no router."""
        return None

    def load(self) -> RoutingLoad | None:
        """Return the routing statistics from the last forward; None if the layer has no load-balancing loss."""
        return None

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Compute the layer's output. `forward` calls this method. `mask` is the dropout mask, `step` the step index."""
        raise NotImplementedError

    def finish(self, outputs: torch.Tensor, mask: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
        """Apply dropout to the layer's outputs, and add the residual."""
        if mask is not None:
            outputs = outputs * mask
        return outputs + inputs if self.layer.residual else outputs


class RoutedModule(LayerModule):
    """Base class for layers that send rows to experts or similar units, which may lie on several ranks."""

    num_units: int
    """How many experts all ranks have together."""

    def __init__(self, layer: AnyLayer) -> None:
        super().__init__(layer)
        self.by_units: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Function that computes rows, (rows, features), sorted by unit with counts (units,), if other ranks hold some units."""
        self.region: Region = UNSHARDED
        """Collectives around the units if each unit is sharded over ranks."""

    def units(self) -> nn.Module:
        """Return the module with the experts' parameters, stacked along dim 0."""
        raise NotImplementedError

    def compute_units(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute this rank's experts on rows sorted by expert. `counts` says how many rows each expert gets.

        The method must call the module from `units` once, because wrappers around that module gather parameters in its forward.
        """
        raise NotImplementedError


def use_rank_implementations(model: nn.Module) -> None:
    """Let layers use the operations that only ranks use."""
    for layer in model.modules():
        if isinstance(layer, LayerModule):
            layer.use_rank_implementation()


def norm_of(norm: Norm | None, features: int) -> nn.Module | None:
    """Build a norm module, or return None if the layer has no norm."""
    if norm is None:
        return None
    return nn.LayerNorm(features) if norm is Norm.LAYER else nn.RMSNorm(features)


def replicated_like(values: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return `made` as a replicated DTensor if `values` is a DTensor, otherwise unchanged.

    Operations cannot mix DTensors with plain tensors. All ranks must have computed the same `made`.
    """
    if not isinstance(values, DTensor):
        return made
    return DTensor.from_local(made, values.device_mesh, [Replicate()] * values.device_mesh.ndim, run_check=False)


def local_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter's local tensor if `parameter` is a DTensor and `values` is not, otherwise `parameter` itself."""
    if isinstance(values, DTensor) or not isinstance(parameter, DTensor):
        return parameter
    part: torch.Tensor = parameter.to_local()
    return part
