"""Redistributions by spmd_types' collectives. Their names state types, and the types determine the derivatives.

Invariant (I) is replicated with a replicated gradient. Replicated (R) has a partial gradient. S(dim) is sharded with a sharded
gradient. Partial (P) is a partial sum. See https://github.com/meta-pytorch/spmd_types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch.nn import functional

from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.layouts.base.plan.linears import ActivationPlacement
from equivcheck.layouts.parallelisms.local_tensor_parallel.planned_modules import Redistribution
from equivcheck.layouts.parallelisms.local_tensor_parallel.regions import AxisRanks, dim_of


@dataclass(slots=True, kw_only=True)
class TypedRanks(AxisRanks):
    """The ranks along one mesh axis, as seen from one rank, with collectives from spmd_types."""

    def move(self, values: torch.Tensor, route: Redistribution) -> torch.Tensor:
        """Redistribute an activation as `route` says. Backward redistributes the gradient.

        The new activation and its gradient are contiguous, because a pipeline may send them. The new activation is not a view.
        """
        if self.size == 1 or not route.moves:
            return values
        moved = self._moved(_tensor(WithContiguousGradient.apply(values)), route)  # type: ignore[no-untyped-call]
        return moved.clone(memory_format=torch.contiguous_format)

    def _moved(self, values: torch.Tensor, route: Redistribution) -> torch.Tensor:
        """Redistribute values that have to move. Sharded values are gathered before they are sharded along another dim."""
        source, target = route.source, route.target
        if source is ActivationPlacement.PARTIAL:
            return self._summed(values, target)
        if source is ActivationPlacement.REPLICATED:
            return self._copied(values) if target is source else self._cut(values, dim_of(target))
        extent = (self.rows, route.features)[dim_of(source)]
        is_addend = route.gradient_source is ActivationPlacement.PARTIAL
        whole = self._whole(values, dim_of(source), extent, spmd.R if is_addend else spmd.I)
        return whole if target is ActivationPlacement.REPLICATED else self._cut(whole, dim_of(target))

    def copy_to_region(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a replicated parameter unchanged; backward sums its gradient over ranks.

        Use it if ranks apply the parameter to different values.
        """
        return parameter if self.size == 1 else self._copied(parameter)

    def bias_on_first_rank(self, parameter: torch.Tensor) -> torch.Tensor:
        """Convert a replicated parameter to the type for partial sums in spmd_types, whose sum over ranks contains it once."""
        return (
            parameter
            if self.size == 1
            else _tensor(spmd.convert(parameter, self.group, src=spmd.I, dst=spmd.P, expert_mode=True))
        )

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of a tensor over ranks, by an all-gather, because spmd_types only reduces sums."""
        return _tensor(spmd.all_gather(values.contiguous(), self.group, src=spmd.V, dst=spmd.R)).amax(0)

    def _copied(self, whole: torch.Tensor) -> torch.Tensor:
        return _tensor(WithContiguousGradient.apply(spmd.convert(whole, self.group, src=spmd.I, dst=spmd.R)))  # type: ignore[no-untyped-call]

    def _summed(self, addend: torch.Tensor, target: ActivationPlacement) -> torch.Tensor:
        if target is ActivationPlacement.REPLICATED:
            return _tensor(spmd.all_reduce(addend.contiguous(), self.group, src=spmd.P, dst=spmd.I))
        dim = dim_of(target)
        rows = self._padded(addend.movedim(dim, 0))
        part = _tensor(spmd.reduce_scatter(rows, self.group, src=spmd.P, dst=spmd.S(0)))
        return self._own(part, addend.shape[dim]).movedim(0, dim)

    def _cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        rows = self._padded(whole.movedim(dim, 0))
        part = _tensor(spmd.convert(rows, self.group, src=spmd.I, dst=spmd.S(0)))
        return self._own(part, whole.shape[dim]).movedim(0, dim)

    def _whole(self, part: torch.Tensor, dim: int, extent: int, kind: Any) -> torch.Tensor:
        rows = _lengthened(part.movedim(dim, 0), chunk_size(extent, self.size))
        gathered = _tensor(spmd.all_gather(rows, self.group, src=spmd.S(0), dst=kind))
        return gathered.narrow(0, 0, extent).movedim(0, dim)

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad rows to a multiple of the number of ranks."""
        return _lengthened(rows, chunk_size(len(rows), self.size) * self.size)

    def _own(self, part: torch.Tensor, extent: int) -> torch.Tensor:
        """Remove this rank's padding."""
        return part.narrow(0, 0, chunk_sizes(extent, self.size)[self.index])


class WithContiguousGradient(torch.autograd.Function):
    """Identity that makes gradients contiguous.

    spmd_types refuses to sum gradients that are not contiguous, and pipelines refuse to send them.
    """

    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values.view_as(values)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Make the gradient contiguous."""
        return gradients[0].contiguous()


def _lengthened(rows: torch.Tensor, length: int) -> torch.Tensor:
    return functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, length - len(rows))).contiguous()


def _tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value
    return found
