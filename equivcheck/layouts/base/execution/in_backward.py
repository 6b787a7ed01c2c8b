"""Update each parameter in backward, by an optimizer of its own that a hook calls after accumulation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from equivcheck.scenario import ClipValue
from equivcheck.training.setup import Setup


def update_in_backward(setup: Setup) -> None:
    """Change a setup so that hooks update parameters during the last microbatch's backward."""
    updates = _UpdatesInBackward(setup)
    inner = setup.accumulation

    def accumulation(last: bool) -> AbstractContextManager[object]:
        updates.is_last = last
        return inner(last)

    setup.accumulation = accumulation
    setup.before_training.append(updates.register)
    setup.before_update.append(updates.show_gradients)
    setup.update = _skip_gradients(setup)


def _skip_gradients(setup: Setup) -> Callable[[torch.optim.Optimizer], None]:
    """Return an update that changes no parameter, because the hooks have updated them."""
    inner = setup.update

    def update(optimizer: torch.optim.Optimizer) -> None:
        # A schedule warns unless the optimizer has stepped; without gradients the step does nothing.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        inner(optimizer)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    return update


class _UpdatesInBackward:
    """Optimizers with one parameter each. They share state and settings with the loop's optimizer."""

    def __init__(self, setup: Setup) -> None:
        self._clipping = setup.training.clipping
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.is_last = True

    def register(self, optimizer: torch.optim.Optimizer, _schedule: LRScheduler | None) -> None:
        """Build an optimizer for each trained parameter, and register its hook."""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    # The group has all settings, also those with defaults.
                    own = type(optimizer)([{**group, "params": [parameter]}])  # type: ignore[call-arg]
                    parameter.register_post_accumulate_grad_hook(partial(self._step, optimizer, own, index))

    def _step(self, optimizer: torch.optim.Optimizer, own: torch.optim.Optimizer, index: int, parameter: torch.Tensor) -> None:
        if not self.is_last or parameter.grad is None:
            return
        self._gradients[parameter] = parameter.grad.detach().clone()
        if isinstance(self._clipping, ClipValue):
            nn.utils.clip_grad_value_([parameter], self._clipping.clip_value)
        # Schedules change the loop's optimizer, and loading a checkpoint replaces its groups and its state.
        settings = {name: value for name, value in optimizer.param_groups[index].items() if name != "params"}
        own.param_groups[0].update(settings)
        own.state = optimizer.state
        own.step()
        parameter.grad = None

    def show_gradients(self, _optimizer: torch.optim.Optimizer, _step: int) -> None:
        """Restore the gradients removed by the hooks, because the training loop reads them after the update."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients.clear()
