"""Modules of pipeline stages."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from equivcheck.training.model import MLP


class Balance(Protocol):
    """A stage's load-balancing losses."""

    def add(self, stage: StageLayers, values: torch.Tensor) -> torch.Tensor:
        """Return the activations `values`, with the losses in their graph."""

    def keep(self) -> None:
        """Add the last forward's losses to the step's sum."""

    def take(self) -> float:
        """Return the step's sum, and start a new one."""


class StageLayers(nn.Module):
    """Module with the consecutive layers of one pipeline stage.

    The first stage starts with the embedding, and the last stage ends with the head. All arguments are tensors, because torch
    versions treat arguments of other types differently.
    """

    step: int
    sends: tuple[DeviceMesh, Placement] | None = None
    """Mesh and placement of the DTensor that the stage returns. None if it returns a plain tensor."""

    balance: Balance | None = None
    """The stage's load-balancing losses. None if the model has none."""

    def __init__(self, model: MLP, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.indices, self.step = layers, 0
        # These two are methods, so the modules below register the parameters for the schedule, under their names in the model.
        self.embed, self.finish = model.embed if is_first else None, model.finished if is_last else None
        self.embedding, self.positions = (model.embedding, model.positions) if is_first else (None, None)
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in layers})
        self.head = model.head if is_last else None
        self.scale = model.scale if is_last and "scale" in model._parameters else None
        # Wrappers broadcast the buffers of the module that they wrap.
        self.register_buffer("offset", model.offset if is_last and "offset" in model._buffers else None)

    def forward(self, inputs: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
        """Run the stage on tokens or activations. Dropout masks are keyword arguments, named by layer."""
        received = inputs.to_local() if isinstance(inputs, DTensor) else inputs
        values = received if self.embed is None else self.embed(received)
        for index, block in zip(self.indices, self.layers.values(), strict=True):
            mask = masks.get(mask_of(index))
            if mask is None and block.layer.dropout:  # type: ignore[union-attr]
                # Ranks without rows multiply, too, because a multiplication starts the recomputation of a checkpointed layer.
                mask = values.new_ones(())
            values = block(values, mask, self.step)
        if self.balance is not None:
            values = self.balance.add(self, values)
        if self.sends is not None:
            mesh, placement = self.sends
            return DTensor.from_local(values, mesh, [placement], run_check=False)
        return values if self.finish is None else self.finish(values)


def mask_of(layer: int) -> str:
    """Return the keyword argument for a layer's dropout mask."""
    return f"mask_{layer}"
