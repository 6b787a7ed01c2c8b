"""Differentiable all-to-alls that send rows to their experts' ranks, and back.

Parts may be unequal. Every rank takes part in each all-to-all in forward and backward, even without rows or experts.
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
from equivcheck.training.layers.module import RoutedModule


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exchange:
    """Sends one layer's rows to their experts' ranks, and the outputs back, as seen from one rank."""

    layer: RoutedModule
    """Layer that holds only this rank's experts."""
    group: ProcessGroup
    """Process group of the expert-parallel ranks."""
    num_units: tuple[int, ...]
    """Number of experts on each rank."""
    rank: int
    """This rank's index in the group."""
    names: tuple[str, ...]
    """Names of the expert parameters within the module of experts."""

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Expert outputs for rows sorted by expert.

        Args:
            rows: Shape (rows, features).
            counts: Number of rows for each expert, shape (experts,).
        """
        arriving = self.counts_of_arrivals(counts)
        sent = [int(part.sum()) for part in torch.split(counts, list(self.num_units))]
        received = [int(each) for each in arriving.sum(1)]
        arrived = self.exchange_rows(rows, received, sent)
        units = torch.arange(arriving.shape[1]).repeat(len(received)).repeat_interleave(arriving.flatten())
        order = units.argsort(stable=True)
        made = self.layer.compute_units(arrived[order], arriving.sum(0))
        made = self.put_back(made, order)
        return self.exchange_rows(made if self._uses_parameters else made + self.nothing(), sent, received)

    @property
    def _uses_parameters(self) -> bool:
        """Whether the outputs depend on this rank's parameters. `grouped_mm` depends on them even if there are no experts."""
        return self.num_units[self.rank] > 0 or bool(self.layer.units().grouped)

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Return the outputs in the rows' order of arrival. `order` sorted the rows by expert."""
        return made[order.argsort()]

    def nothing(self) -> torch.Tensor:
        """Return a zero, computed as the sum over this rank's empty parameters.

        Because the output depends on them, backward makes the same collective calls on every rank. During forward, a wrapper
        may have replaced the parameters by plain tensors.
        """
        held = [attrgetter(name)(self.layer.units()) for name in self.names]
        found: torch.Tensor = sum((each.to_local() if isinstance(each, DTensor) else each).sum() for each in held)  # type: ignore[assignment]
        return found

    def counts_of_arrivals(self, counts: torch.Tensor) -> torch.Tensor:
        """Exchange row counts. `counts` says how many rows this rank sends to each expert.

        Returns how many rows arrive from each rank for each expert on this rank. The tensor has shape (ranks, own experts).
        """
        own, ranks = self.num_units[self.rank], len(self.num_units)
        arriving = counts.new_empty(own * ranks)
        dist.all_to_all_single(arriving, counts, [own] * ranks, list(self.num_units), group=self.group)
        return arriving.view(ranks, own)

    def exchange_rows(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        """Exchange rows by an all-to-all. Backward sends their gradients the other way.

        `received` and `sent` are the numbers of rows for each rank.
        """
        exchange: Any = collectives.all_to_all_single_autograd
        wait: Any = collectives.wait_tensor
        found: torch.Tensor = wait(exchange(rows.contiguous(), received, sent, self.group))
        return found


Keep = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]
"""Function to take this rank's part from a parameter with experts along dim 0."""


def shard_units(model: nn.Module, mesh: DeviceMesh, keep: Keep) -> None:
    """Keep only this rank's experts in each layer, and let the layer exchange rows with other ranks.

    `keep` takes this rank's part from a parameter.
    """
    for layer in model.modules():
        if isinstance(layer, RoutedModule):
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
    """Return this rank's part of a parameter with experts along dim 0, as a plain tensor."""
    size = parameter.shape[0]
    start = min(chunk_size(size, mesh.size()) * mesh.get_local_rank(), size)
    return parameter.narrow(0, start, chunk_sizes(size, mesh.size())[mesh.get_local_rank()]).clone()


def dtensor_of_all(parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a parameter with experts along dim 0 as a DTensor with `Shard(0)`."""
    return distribute_tensor(parameter, mesh, [Shard(0)])


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two lists: the model's expert parameters and its other parameters. Call it before the first forward.

    After forward, `DistributedDataParallel` may have replaced parameters by local tensors, known to the optimizer only.
    """
    dispatching = [layer for layer in model.modules() if isinstance(layer, RoutedModule)]
    own = [parameter for layer in dispatching for parameter in layer.units().parameters()]
    held = set(own)
    return own, [parameter for parameter in model.parameters() if parameter not in held]


def reduce_gradients(own: list[nn.Parameter], others: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average the gradients of other parameters over ranks, and divide expert gradients (`own`) by the number of ranks.

    Expert gradients already contain the rows of all ranks. If other axes shard a gradient, its local shard is reduced.
    """
    gradients_by_hand.sum_gradients(others, mesh.get_group())
    gradients_by_hand.divide_gradients([*own, *others], mesh.size())
