"""What a model chooses by the values that it computes, such as experts: rounding may move a choice, and with it everything."""

from __future__ import annotations

import torch
from torch import nn

from equivcheck.training.layers.module import LayerModule


class RecordedChoices:
    """The choices of every forward of a model from now on; none where nothing in it chooses."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[torch.Tensor] = []
        for module in model.modules():
            chooser = module.chooser() if isinstance(module, LayerModule) else None
            if chooser is not None:
                chooser.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        self._kept.append(outputs[0])

    def taken(self) -> tuple[torch.Tensor, ...]:
        """Those since the last time, in the order in which they were made."""
        found, self._kept = tuple(self._kept), []
        return found
