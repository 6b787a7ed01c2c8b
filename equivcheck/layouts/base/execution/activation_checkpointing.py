"""Activation checkpointing: layers that save nothing for backward and run again there."""

from __future__ import annotations

from torch import nn

from equivcheck.scenario import Execution
from equivcheck.training.layers.module import LayerModule


def recompute_layers(model: nn.Module, execution: Execution) -> None:
    """Turn on recomputation for the chosen layers.

    Call it before any layout is applied, so that a layer's wrapper is outside the recomputation.
    """
    for index, layer in enumerate(model.get_submodule("layers").children()):
        if isinstance(layer, LayerModule):
            layer.recomputes = execution.checkpoints(index)
