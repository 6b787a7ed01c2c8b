"""Rows sent to the ranks that hold the units that they have chosen, and back, with their derivatives.

By all-to-alls of unequal parts. Every rank makes each of them, forward and backward, whatever it holds: what has no rows, or no
unit, takes part with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from equivcheck.layouts.base import gradients_by_hand
from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.training.layers.module import DispatchingModule


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exchange:
    """The units of one layer over the ranks of an axis, as one of them sees them."""

    layer: DispatchingModule
    """The layer, of which this rank holds its own units alone."""
    group: ProcessGroup
    """The ranks."""
    num_units: tuple[int, ...]
    """Per rank, how many units it holds."""
    rank: int
    """Which of them this one is."""
    names: tuple[str, ...]
    """The names of the units' parameters in their module."""

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What units make of rows, (rows, features), sorted by unit, so many for each, (units,)."""
        arriving = self.counts_of_arrivals(counts)
        sent = [int(part.sum()) for part in torch.split(counts, list(self.num_units))]
        received = [int(each) for each in arriving.sum(1)]
        arrived = self.exchanged(rows, received, sent)
        units = torch.arange(arriving.shape[1]).repeat(len(received)).repeat_interleave(arriving.flatten())
        order = units.argsort(stable=True)
        made = self.layer.compute_units(arrived[order], arriving.sum(0))
        made = self.put_back(made, order)
        return self.exchanged(made if self.num_units[self.rank] else made + self.nothing(), sent, received)

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """What has been made of rows in an order as the rows have come."""
        return made[order.argsort()]

    def nothing(self) -> torch.Tensor:
        """Zero, made of the parameters of a rank without units: so its backward calls what that of any other rank does.

        What is put in the place of parameters while forward runs need be none itself.
        """
        held = [attrgetter(name)(self.layer.units()) for name in self.names]
        found: torch.Tensor = sum((each.to_local() if isinstance(each, DTensor) else each).sum() for each in held)  # type: ignore[assignment]
        return found

    def counts_of_arrivals(self, counts: torch.Tensor) -> torch.Tensor:
        """How many rows come from each rank for each unit of this one, (ranks, own units)."""
        own, ranks = self.num_units[self.rank], len(self.num_units)
        arriving = counts.new_empty(own * ranks)
        dist.all_to_all_single(arriving, counts, [own] * ranks, list(self.num_units), group=self.group)
        return arriving.view(ranks, own)

    def exchanged(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        """Rows of other ranks for those sent to them; its derivative sends gradients back."""
        exchange: Any = collectives.all_to_all_single_autograd
        wait: Any = collectives.wait_tensor
        found: torch.Tensor = wait(exchange(rows.contiguous(), received, sent, self.group))
        return found


Keep = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]
"""From a parameter that has units as first dim, what a rank has of it."""


def share_out_units(model: nn.Module, mesh: DeviceMesh, keep: Keep) -> None:
    """Leave each rank its own units of every layer that dispatches, and have it exchange rows for the others'."""
    for layer in model.modules():
        if isinstance(layer, DispatchingModule):
            layer.by_units = Exchange(
                layer=layer,
                group=mesh.get_group(),
                num_units=chunk_sizes(layer.num_units, mesh.size()),
                rank=mesh.get_local_rank(),
                names=tuple(name for name, _ in layer.units().named_parameters()),
            )
            for name, parameter in list(layer.units().named_parameters()):
                own = nn.Parameter(keep(parameter.detach(), mesh), requires_grad=parameter.requires_grad)
                setattr(layer.units(), name, own)


def own_tensor(parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor of a rank's own units."""
    size = parameter.shape[0]
    start = min(chunk_size(size, mesh.size()) * mesh.get_local_rank(), size)
    return parameter.narrow(0, start, chunk_sizes(size, mesh.size())[mesh.get_local_rank()]).clone()


def dtensor_of_all(parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A DTensor of all units, of which a rank has its own."""
    return distribute_tensor(parameter, mesh, [Shard(0)])


def parameters_apart(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of units, and all others, of a model that no forward has gone through.

    What `DistributedDataParallel` has made local tensors of is after that no parameter of the model, but of the optimizer.
    """
    dispatching = [layer for layer in model.modules() if isinstance(layer, DispatchingModule)]
    own = [parameter for layer in dispatching for parameter in layer.units().parameters()]
    held = set(own)
    return own, [parameter for parameter in model.parameters() if parameter not in held]


def reduce_gradients(own: list[nn.Parameter], others: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average the gradients of what every rank has; those of units, which have seen the rows of all ranks, are divided alike.

    Of one that is sharded along other axes that is done to the shard, if there is anything in it.
    """
    gradients_by_hand.sum_gradients(others, mesh.get_group())
    gradients_by_hand.divide_gradients([*own, *others], mesh.size())
