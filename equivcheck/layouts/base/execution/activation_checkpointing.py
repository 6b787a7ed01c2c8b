"""Activation checkpointing: layers that keep nothing for backward and run again there."""

from __future__ import annotations

from torch import nn

from equivcheck.scenario import Execution
from equivcheck.training.layers.module import LayerModule


def recompute_layers(model: nn.Module, execution: Execution) -> None:
    """Let the chosen layers recompute; before any layout, so that a wrapper of a layer is around what is recomputed."""
    for index, layer in enumerate(model.get_submodule("layers").children()):
        if isinstance(layer, LayerModule):
            layer.recomputes = execution.checkpoints(index)
