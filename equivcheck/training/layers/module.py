"""Base classes and building blocks for layer modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
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
    """Linear whose parameters are assigned later."""

    def reset_parameters(self) -> None:
        """Do nothing, because the parameters are replaced, and drawing them would use the process-wide generator."""


class UninitializedEmbedding(nn.Embedding):
    """Embedding whose weight is assigned later."""

    def reset_parameters(self) -> None:
        """Do nothing, because the weight is replaced, and drawing it would use the process-wide generator."""


class RoutingLoad(NamedTuple):
    """Routing statistics from the last forward, for the load-balancing loss."""

    balance: float
    """Loss coefficient."""
    counts: torch.Tensor
    """Positions routed to each unit, (units,), in the dtype of the activations."""
    shares: torch.Tensor
    """Each unit's share in the scores, summed over positions, (units,)."""


class LayerModule(nn.Module):
    """Base class for layer modules; subclasses implement `compute`.

    If `document_length` is set, the sequence contains documents of this many positions, which do not attend to each other.
    """

    def __init__(self, layer: AnyLayer) -> None:
        super().__init__()
        self.layer = layer
        self.sequence: Sequence = FULL_SEQUENCE
        self.document_length: int | None = None
        self.recomputes = False
        self.keeps_products = False

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Map (rows, inputs) to (rows, outputs), or sequences of such rows.

        With activation checkpointing, nothing in between is kept for backward.
        """
        if not self.recomputes:
            return self.compute(inputs, mask, step)
        # Other layers pass no context_fn, because dynamo cannot trace it.
        options: dict[str, Any] = {"context_fn": KEEP_PRODUCTS} if self.keeps_products else {}
        outputs: torch.Tensor = checkpoint(self.compute, inputs, mask, step, use_reentrant=False, **options)
        return outputs

    def chooser(self) -> nn.Module | None:
        """Return the submodule for routing, whose first output says which unit is selected; None if the layer does not route."""
        return None

    def load(self) -> RoutingLoad | None:
        """Return routing statistics from the last forward; None without a load-balancing loss."""
        return None

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Map inputs to outputs, for `forward`."""
        raise NotImplementedError

    def finish(self, outputs: torch.Tensor, mask: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
        """Apply dropout and the residual to the outputs."""
        if mask is not None:
            outputs = outputs * mask
        return outputs + inputs if self.layer.residual else outputs


class RoutedModule(LayerModule):
    """Layer that routes rows to units, such as experts. The units may be distributed over ranks."""

    num_units: int
    """Number of units on all ranks."""

    def __init__(self, layer: AnyLayer) -> None:
        super().__init__(layer)
        self.by_units: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Function that computes rows, (rows, features), sorted by unit with counts (units,), if other ranks hold some units."""
        self.region: Region = UNSHARDED
        """Collectives around the units if each unit is sharded over ranks."""

    def units(self) -> nn.Module:
        """Return the module with the units' parameters, stacked along dim 0."""
        raise NotImplementedError

    def compute_units(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute this rank's units on rows sorted by unit, with the row count for each unit.

        The method must call the module from `units` once, because wrappers around that module gather parameters in its forward.
        """
        raise NotImplementedError


def norm_of(norm: Norm | None, features: int) -> nn.Module | None:
    """Build a norm module, or return None if the layer has no norm."""
    if norm is None:
        return None
    return nn.LayerNorm(features) if norm is Norm.LAYER else nn.RMSNorm(features)


def replicated_like(values: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return `made` as a replicated DTensor if `values` is a DTensor, because plain tensors do not mix.

    All ranks must have computed `made` identically.
    """
    if not isinstance(values, DTensor):
        return made
    return DTensor.from_local(made, values.device_mesh, [Replicate()] * values.device_mesh.ndim, run_check=False)


def local_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor parameter if the values are a plain tensor; otherwise the parameter itself."""
    if isinstance(values, DTensor) or not isinstance(parameter, DTensor):
        return parameter
    part: torch.Tensor = parameter.to_local()
    return part
