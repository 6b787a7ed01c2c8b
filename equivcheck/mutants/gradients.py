"""What becomes of gradients after backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivcheck.mutants.axes import data_rank, data_ranks, gradients, size_of, stepped
from equivcheck.scenario.mesh import REPLICATE, SHARD, TP
from equivcheck.train.setup import Setup


@dataclass(frozen=True, slots=True)
class Scaled:
    """Multiply gradients before they are read; called with the setup of a rank."""

    factor: Callable[[Setup], float]
    """By what."""

    def __call__(self, setup: Setup) -> None:
        """Plant it."""
        factor = self.factor(setup)
        setup.before_update.append(lambda optimizer, _index: scale(optimizer, factor))


def scale(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply all gradients in place."""
    with torch.no_grad():
        for gradient in gradients(optimizer):
            gradient.mul_(factor)


def data_size(setup: Setup) -> float:
    """The number of ranks that compute on different rows."""
    return float(data_ranks(setup))


def over_data_size(setup: Setup) -> float:
    """One over that."""
    return 1.0 / data_ranks(setup)


def over_other_size(setup: Setup) -> float:
    """One over the number of ranks that compute on the same rows."""
    return 1.0 / size_of(setup, TP)


def replicas(setup: Setup) -> float:
    """The number of ranks along which shards are replicated."""
    return float(size_of(setup, REPLICATE))


def shards(setup: Setup) -> float:
    """The number of ranks along which replicas are sharded."""
    return float(size_of(setup, SHARD))


def keep_from_last_step(setup: Setup) -> None:
    """Let each update use the gradients of the step before; the first has none and uses its own."""
    kept: dict[torch.Tensor, torch.Tensor] = {}
    setup.before_update.append(lambda optimizer, _index: _delay(optimizer, kept))


def _delay(optimizer: torch.optim.Optimizer, kept: dict[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in stepped(optimizer):
            if parameter.grad is None:
                continue
            now = parameter.grad.clone()
            parameter.grad.copy_(kept.get(parameter, now))
            kept[parameter] = now


def never_zero(setup: Setup) -> None:
    """Leave gradients as they are between steps."""

    def keep(optimizer: torch.optim.Optimizer, _schedule: object) -> None:
        optimizer.zero_grad = _nothing  # type: ignore[method-assign]

    setup.before_training.append(keep)


def _nothing(set_to_none: bool = True) -> None:
    """Do nothing."""


def zero_before_update(setup: Setup) -> None:
    """Zero gradients after they have been clipped, and then update."""
    update = setup.update

    def forget(optimizer: torch.optim.Optimizer) -> None:
        scale(optimizer, 0.0)
        update(optimizer)

    setup.update = forget


def leave_last_rank_out(setup: Setup) -> None:
    """Let the rank of the last rows compute the right loss, but nothing in backward."""
    if data_rank(setup) == data_ranks(setup) - 1:
        setup.module.register_forward_hook(lambda _module, _inputs, outputs: _without_gradient(outputs))


def _without_gradient(outputs: torch.Tensor) -> torch.Tensor:
    outputs.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return outputs


def start_apart(setup: Setup) -> None:
    """Let ranks but the first start from other parameters."""
    rank = data_rank(setup)
    with torch.no_grad():
        for parameter in _held(setup.model):
            parameter.mul_(1.0 + 0.25 * rank)


def _held(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()]


def keep_one_out(setup: Setup) -> None:
    """Keep the last trained parameter's gradient as this rank alone computed it."""
    parameter = [parameter for parameter in setup.model.parameters() if parameter.requires_grad][-1]
    own: list[torch.Tensor] = []
    parameter.register_hook(lambda gradient: own.append(gradient.detach().clone()))  # type: ignore[no-untyped-call]
    setup.before_update.append(partial(_put_back, parameter, own))


def _put_back(parameter: torch.Tensor, own: list[torch.Tensor], _optimizer: object, _index: int) -> None:
    if parameter.grad is not None and own:
        parameter.grad.copy_(torch.stack(own).sum(0))
    own.clear()
