"""An optimizer that sees shards where it needs whole tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from equivcheck.scenario import Training, ZeroGrad
from equivcheck.train.read import State
from equivcheck.train.setup import Setup


def update_shards(setup: Setup) -> None:
    """Let the optimizer step local tensors, and take its statistics over them."""
    shards = _Shards(setup)
    setup.build_optimizer, setup.update, setup.state_of = shards.build, shards.update, shards.state
    setup.before_step.append(shards.zero)


@dataclass(slots=True, eq=False)
class _Shards:
    setup: Setup
    """How this rank trains."""
    locals_of: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """By parameter, its local tensor as the optimizer has it: of the same memory."""

    def build(self, training: Training, parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """An optimizer of local tensors."""
        from equivcheck.train.optimizer import build_optimizer

        pairs = list(parameters)
        self.locals_of = {parameter: _leaf(parameter) for _, parameter in pairs}
        return build_optimizer(training, [(name, self.locals_of[parameter]) for name, parameter in pairs])

    def zero(self, _optimizer: torch.optim.Optimizer, _index: int) -> None:
        """What the optimizer would do to gradients of its own parameters."""
        for parameter in self.locals_of:
            if self.setup.training.zero_grad is ZeroGrad.NONE:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step local tensors by local gradients; there is nothing to do to an empty one."""
        for parameter, local in self.locals_of.items():
            gradient = parameter.grad
            held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.grad = held if local.numel() else None
        optimizer.step()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """The state of local tensors as that of their parameters."""
        return {
            parameter: {key: _as_whole(parameter, local, value) for key, value in optimizer.state[local].items()}
            for parameter, local in self.locals_of.items()
            if local in optimizer.state
        }


def _leaf(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = parameter.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.detach().requires_grad_(parameter.requires_grad)


def _as_whole(parameter: torch.Tensor, local: torch.Tensor, value: Any) -> Any:
    """A state tensor as large as a shard as a DTensor that lies as its parameter does."""
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == local.shape):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
