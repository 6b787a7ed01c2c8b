"""An optimizer for one device that makes a mistake on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck.user.task import takes_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """A mistake in an optimizer's updates. With the default values, there is no mistake."""

    num_shards: int = 1
    """Into how many shards each parameter is split. Each shard is updated as if it were a full parameter."""
    shard_dim: int = 0
    """Dim along which parameters are split. Vectors are always split along dim 0."""
    skips: frozenset[str] = frozenset()
    """Names of parameters that are not updated."""
    times: int = 1
    """How many updates are made in a step."""
    gradient_factor: float = 1.0
    """Factor by which gradients are multiplied."""
    update_factors: Mapping[str, float] = field(default_factory=dict)
    """Factor by which the update of each parameter is multiplied, by name. Weight decay is not multiplied."""
    loses_state_after: int | None = None
    """Number of steps after which the optimizer loses its state. None if it keeps it."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """New names for parameters, for an optimizer that treats parameters by their names."""
    changes_groups: Callable[[list[dict[str, Any]]], None] | None = None
    """Function that changes settings in the optimizer's parameter groups."""


class Altered(torch.optim.Optimizer):
    """Optimizer that imitates a mistake.

    It runs the user's optimizer on copies of the parameters or shards, then copies the result back.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], build: Callable[..., Any], alteration: Alteration) -> None:
        super().__init__([parameter for _, parameter in named], {})
        self._named, self._build, self._alteration = named, build, alteration
        self._without_decay = None
        if alteration.update_factors:
            undecayed = Alteration(changes_groups=partial(set_weight_decay, value=0.0))
            self._without_decay = Altered([(name, nn.Parameter(each.detach().clone())) for name, each in named], build, undecayed)
        self._shards = {name: self._copies(parameter) for name, parameter in named}
        self._inner = self._built()
        self._num_steps = 0

    def _copies(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        return [nn.Parameter(part.clone()) for part in self._parts(parameter.detach())]

    def _parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not tensor.dim() or self._alteration.num_shards == 1:
            return (tensor,)
        return tensor.chunk(self._alteration.num_shards, dim=self._dim(tensor))

    def _dim(self, tensor: torch.Tensor) -> int:
        return self._alteration.shard_dim if tensor.dim() > 1 else 0

    def _built(self) -> Any:
        skips, renamed = self._alteration.skips, self._alteration.renamed
        kept = [(name, shard) for name, _ in self._named if name not in skips for shard in self._shards[name]]
        if takes_names(self._build):
            given: list[Any] = [(renamed.get(name, name), shard) for name, shard in kept]
        else:
            given = [shard for _, shard in kept]
        inner = self._build(given) if given else None
        if inner is not None and self._alteration.changes_groups is not None:
            self._alteration.changes_groups(inner.param_groups)
        return inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # noqa: ARG002 - torch's signature
        """Update all parameters as the user's optimizer does, but with the imitated mistake."""
        if self._num_steps == self._alteration.loses_state_after:
            self._inner = self._built()
        self._num_steps += 1
        for name, parameter in self._named:
            if parameter.grad is not None:
                for shard, part in zip(self._shards[name], self._parts(parameter.grad), strict=True):
                    shard.grad = part * self._alteration.gradient_factor
        for _ in range(self._alteration.times if self._inner is not None else 0):
            self._inner.step()
        updates = {} if self._without_decay is None else self._without_decay.updates_from(self._named)
        for name, parameter in self._named:
            self._copy_back(name, parameter, updates)

    def updates_from(self, named: list[tuple[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
        """Make one step from these parameters and their gradients. Returns how each parameter changes, by name."""
        for (_, own), (name, other) in zip(self._named, named, strict=True):
            own.copy_(other)
            own.grad = other.grad
            for shard, part in zip(self._shards[name], self._parts(own.detach()), strict=True):
                shard.copy_(part)
        before = {name: own.detach().clone() for name, own in self._named}
        self.step()
        return {name: own.detach() - before[name] for name, own in self._named}

    def _copy_back(self, name: str, parameter: nn.Parameter, updates: Mapping[str, torch.Tensor]) -> None:
        shards, dim = self._shards[name], self._dim(parameter)
        after = shards[0].detach() if len(shards) == 1 else torch.cat([shard.detach() for shard in shards], dim)
        factor = self._alteration.update_factors.get(name, 1.0)
        parameter.copy_(after if factor == 1.0 else after + (factor - 1.0) * updates[name])
        for shard, part in zip(shards, self._parts(parameter), strict=True):
            shard.copy_(part)
        states = [{} if self._inner is None else self._inner.state.get(shard, {}) for shard in shards]
        self.state[parameter] = {key: self._joined([state[key] for state in states], shards, dim) for key in states[0]}

    @staticmethod
    def _joined(values: list[Any], shards: list[nn.Parameter], dim: int) -> Any:
        is_sharded = isinstance(values[0], torch.Tensor) and values[0].shape == shards[0].shape and len(values) > 1
        return torch.cat(values, dim) if is_sharded else values[0]


def set_weight_decay(groups: list[dict[str, Any]], *, value: float | None = None) -> None:
    """Set the weight decay to `value` in all parameter groups that have one. If it is None, use the largest of their values."""
    found = [group for group in groups if "weight_decay" in group]
    largest = max((float(group["weight_decay"]) for group in found), default=0.0)
    for group in found:
        group["weight_decay"] = largest if value is None else value
