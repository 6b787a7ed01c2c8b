"""Record which experts routers choose. Rounding may change a choice, and so all later values."""

from __future__ import annotations

import torch
from torch import nn

from equivcheck.training.layers.module import LayerModule


class RecordedChoices:
    """Records which experts the model's routers choose in each forward. Nothing is recorded if the model has no router."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[torch.Tensor] = []
        for module in model.modules():
            chooser = module.chooser() if isinstance(module, LayerModule) else None
            if chooser is not None:
                chooser.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        self._kept.append(outputs[0])

    def take_all(self) -> tuple[torch.Tensor, ...]:
        """Return the choices recorded since the last call, in order, and forget them."""
        found, self._kept = tuple(self._kept), []
        return found
