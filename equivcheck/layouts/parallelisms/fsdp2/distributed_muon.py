"""Distributed Muon: one rank owns each sharded matrix and orthogonalizes the full matrix.

An all-to-all sends all shards to the matrix's owner, and another all-to-all sends the orthogonalized shards back. Large trainings
do the same (arXiv:2502.16982 by gathers; pytorch/torchtitan#2494 and NVIDIA/Megatron-LM#6720 by owners).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from equivcheck.layouts.base.partition import chunk_sizes


class DistributedMuon(torch.optim.Muon):
    """`torch.optim.Muon` for DTensors sharded along one dim over a process group.

    For each matrix, one rank computes the update.
    """

    def __init__(
        self, groups: Iterable[Any], group: dist.ProcessGroup, owners: Mapping[torch.Tensor, int], **settings: Any
    ) -> None:
        """Like `Muon`, and in addition with the group, and each parameter's owner as a rank within the group."""
        super().__init__(groups, **settings)
        self.group, self.owners = group, owners
        # No parameter has an owner if all are frozen, as in a pipeline stage with frozen layers.
        self.nothing = _local(self.param_groups[0]["params"][0]).detach().new_empty(0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with a gradient. All ranks must have gradients for the same parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        trained = [(each, settings) for settings in self.param_groups for each in settings["params"] if each.grad is not None]
        moved = {each: self._momentum(each, settings) for each, settings in trained}
        updates = self._orthogonalised(moved, dict(trained))
        for each, settings in trained:
            local = _local(each)
            local.mul_(1 - settings["lr"] * settings["weight_decay"]).add_(updates[each], alpha=-settings["lr"])
        return loss

    def _momentum(self, parameter: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        """Update the momentum, and return this rank's shard to orthogonalize."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None, "only such are updated"
        kept, gradient = _local(state["momentum_buffer"]), _local(parameter.grad)
        kept.lerp_(gradient, 1 - settings["momentum"])
        return gradient.lerp(kept, settings["momentum"]) if settings["nesterov"] else kept

    def _orthogonalised(
        self, moved: dict[torch.Tensor, torch.Tensor], settings: Mapping[torch.Tensor, dict[str, Any]]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Return this rank's orthogonalized update shards, by parameter."""
        if not moved:
            return {}
        count, rank = self.group.size(), self.group.rank()
        owned = [[each for each in moved if self.owners[each] == owner] for owner in range(count)]
        own, shapes = owned[rank], [[moved[each].shape for each in some] for some in owned]
        shards = self._exchanged(
            [[moved[each] for each in some] for some in owned], [_shapes(own, count, at) for at in range(count)]
        )
        whole = [
            _orthogonal(torch.cat([some[number] for some in shards], _dim(each)), settings[each])
            for number, each in enumerate(own)
        ]
        parts = [torch.split(update, _sizes(each, count), _dim(each)) for update, each in zip(whole, own, strict=True)]
        found = self._exchanged([[part[target] for part in parts] for target in range(count)], shapes)
        return dict(zip(chain(*owned), chain(*found), strict=True))

    def _exchanged(self, sent: list[list[torch.Tensor]], shapes: list[list[torch.Size]]) -> list[list[torch.Tensor]]:
        """Exchange matrices with each rank in the group. `shapes` are the shapes of received matrices."""
        flat = torch.cat([self.nothing, *(matrix.reshape(-1) for some in sent for matrix in some)])
        outgoing = [sum(matrix.numel() for matrix in some) for some in sent]
        incoming = [sum(shape.numel() for shape in some) for some in shapes]
        received = flat if self.group.size() == 1 else flat.new_empty(sum(incoming))
        if self.group.size() > 1:
            dist.all_to_all_single(received, flat, incoming, outgoing, group=self.group)
        return [
            [part.view(shape) for part, shape in zip(torch.split(some, [shape.numel() for shape in own]), own, strict=True)]
            for some, own in zip(torch.split(received, incoming), shapes, strict=True)
        ]


def _orthogonal(update: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Return Muon's update without learning rate and momentum."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = -update
    own = {name: settings[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    optimizer: torch.optim.Optimizer = torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **own)
    optimizer.step()
    return matrix.detach()


def _shapes(parameters: Iterable[torch.Tensor], count: int, number: int) -> list[torch.Size]:
    """Return one rank's shard shapes."""
    dims = [(each, _dim(each)) for each in parameters]
    return [torch.Size((*each.shape[:dim], _sizes(each, count)[number], *each.shape[dim + 1 :])) for each, dim in dims]


def _sizes(parameter: torch.Tensor, count: int) -> list[int]:
    """Return all shard sizes along the sharded dim."""
    return list(chunk_sizes(parameter.shape[_dim(parameter)], count))


def _dim(parameter: torch.Tensor) -> int:
    placement = parameter.placements[-1]  # type: ignore[attr-defined]
    assert isinstance(placement, Shard), "fully_shard cuts each parameter along the last axis of its mesh"
    return placement.dim


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


DEFINED = (DistributedMuon, _orthogonal, _shapes, _sizes, _dim, _local)
"""Definitions that a script needs from this module."""
