"""Activation checkpointing: layers that keep nothing for backward and run again there."""

from __future__ import annotations

from torch import nn

from equivcheck.layers.module import LayerModule
from equivcheck.scenario import Recompute


def recompute_layers(model: nn.Module, recompute: Recompute) -> None:
    """Let the chosen layers recompute; before any layout, so that a wrapper of a layer is around what is recomputed."""
    for index, layer in enumerate(model.get_submodule("layers").children()):
        if isinstance(layer, LayerModule):
            layer.recomputes = recompute is Recompute.EVERY_LAYER or (recompute is Recompute.ODD_LAYERS and index % 2 == 1)
