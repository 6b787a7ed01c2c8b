"""What the modules of all kinds of layers have in common, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from equivcheck.scenario import Activation, AnyLayer, Norm
from equivcheck.training.layers.region import UNCUT, Region
from equivcheck.training.layers.sequence import WHOLE, Sequence

Function = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[Activation, Function] = {
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.TANH: torch.tanh,
    Activation.SIGMOID: torch.sigmoid,
    Activation.SILU: functional.silu,
}
"""Every activation but the identity, which is left out."""


class Linear(nn.Linear):
    """A linear whose parameters are given to it."""

    def reset_parameters(self) -> None:
        """Leave the parameters alone: they are replaced, and drawing them would use the process-wide generator."""


class Embedding(nn.Embedding):
    """An embedding whose rows are given to it."""

    def reset_parameters(self) -> None:
        """Leave the rows alone: they are replaced, and drawing them would use the process-wide generator."""


class Load(NamedTuple):
    """How a forward has loaded the units of a layer: what its loss of its own is made of."""

    balance: float
    """The coefficient of that loss."""
    counts: torch.Tensor
    """How often each unit has been chosen, (units,), in the element type of the values."""
    shares: torch.Tensor
    """Each unit's share of the scores of a position, summed over positions, (units,)."""


class LayerModule(nn.Module):
    """One layer; a kind derives from it and says what it computes."""

    def __init__(self, layer: AnyLayer) -> None:
        super().__init__()
        self.layer = layer
        self.sequence: Sequence = WHOLE
        self.recomputes = False

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """Map (rows, inputs) to (rows, outputs), or sequences of the one to sequences of the other.

        A layer that recomputes keeps nothing between the two for backward.
        """
        if not self.recomputes:
            return self.compute(inputs, mask, step)
        outputs: torch.Tensor = checkpoint(self.compute, inputs, mask, step, use_reentrant=False)
        return outputs

    def chooser(self) -> nn.Module | None:
        """What in it chooses by values, and gives first of all whether each thing is chosen; None where nothing does."""
        return None

    def load(self) -> Load | None:
        """How its last forward has loaded its units; None where it has no loss of its own."""
        return None

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:
        """What `forward` maps by."""
        raise NotImplementedError

    def ended(self, outputs: torch.Tensor, mask: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs after dropout and the residual."""
        if mask is not None:
            outputs = outputs * mask
        return outputs + inputs if self.layer.residual else outputs


class DispatchingModule(LayerModule):
    """A layer with units, such as experts, each of which computes the rows that choose it; ranks may share out the units."""

    num_units: int
    """All units, of whatever rank."""

    def __init__(self, layer: AnyLayer) -> None:
        super().__init__(layer)
        self.by_units: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """What computes rows, (rows, features), sorted by unit, so many for each, (units,), where other ranks hold some units."""
        self.region: Region = UNCUT
        """What moves values where other ranks hold parts of each unit."""

    def units(self) -> nn.Module:
        """What has the units' parameters, with the units as first dim of each."""
        raise NotImplementedError

    def compute_units(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What the units held here make of rows, sorted by unit, so many for each: by one call of the module of `units`.

        So that what is put around that module finds its parameters where they are used.
        """
        raise NotImplementedError


def norm_of(norm: Norm | None, features: int) -> nn.Module | None:
    """The module of a normalisation."""
    if norm is None:
        return None
    return nn.LayerNorm(features) if norm is Norm.LAYER else nn.RMSNorm(features)


def beside(values: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A tensor made alike on every rank, such that it goes with the values: DTensors do not mix with plain tensors."""
    if not isinstance(values, DTensor):
        return made
    return DTensor.from_local(made, values.device_mesh, [Replicate()] * values.device_mesh.ndim, run_check=False)


def part_beside(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter such that it goes with the values: beside plain tensors what this rank holds of a DTensor."""
    if isinstance(values, DTensor) or not isinstance(parameter, DTensor):
        return parameter
    part: torch.Tensor = parameter.to_local()
    return part
