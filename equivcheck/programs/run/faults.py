"""Faults planted in operations on ranks, to test whether the checker finds them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from equivcheck.programs.nouns.placement import REPLICATE, reduction_of
from equivcheck.programs.nouns.program import Operation
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.one_device import Outputs
from equivcheck.programs.run.plain.rules import ALONG_A_DIM
from equivcheck.programs.run.plain.target import PlainTarget
from equivcheck.programs.run.rank import DTensorTarget


class DoubledBackward(DTensorTarget):
    """Bug: a redistribution doubles the gradient in backward."""

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Bug: redistribute the value, but double its gradient in backward."""
        moved = super().redistribute(value, placements)
        if moved.requires_grad:
            moved.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return moved


class DroppedAllReduce(DTensorTarget):
    """Bug: a redistribution uses partial values without reducing them."""

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Bug: treat each rank's partial values as replicated, without the all-reduce, before redistributing."""
        kept = [Replicate() if each.is_partial() else each for each in value.placements]
        if kept == list(value.placements):
            return super().redistribute(value, placements)
        return super().redistribute(self.from_local(value.to_local(), kept, value.shape, value.stride()), placements)


class FullPartials(DTensorTarget):
    """Bug: partial values all contain the full value, as if each rank had already reduced."""

    def distribute(self, full: torch.Tensor, placements: tuple[str, ...]) -> torch.Tensor:
        """Bug: give each rank the full value, and call it partial."""
        whole = tuple(REPLICATE if reduction_of(each) == "sum" else each for each in placements)
        tensor: Any = super().distribute(full, whole)
        kept = super().distribute(torch.zeros_like(full), placements)
        assert isinstance(kept, DTensor)
        return self.from_local(tensor.to_local(), kept.placements, full.shape, full.stride())


class SwappedRows(DTensorTarget):
    """Bug: a redistribution from one sharded dim to another reverses each rank's rows."""

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Bug: redistribute the value, but reverse each rank's rows if another dim is sharded afterwards."""
        moved = super().redistribute(value, placements)
        assert isinstance(moved, DTensor)
        pairs = zip(value.placements, moved.placements, strict=True)
        if not any(isinstance(one, Shard) and isinstance(other, Shard) and one != other for one, other in pairs):
            return moved
        return self.from_local(moved.to_local().flip(0), moved.placements, moved.shape, moved.stride())


class ElementwiseRule(DTensorTarget):
    """Bug: operations along a dim, such as softmax, have the sharding rule of `clone`, so each rank computes on its own shard."""

    planted_in: ClassVar[frozenset[str]] = frozenset(ALONG_A_DIM)

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """Bug: run operations along a dim, such as softmax, on each rank's own shard."""
        if statement.name not in self.planted_in:
            return super().call(statement, arguments)
        whole: Any = arguments[0]
        found = results_of(statement.name, [whole.to_local()], statement.dim)
        return tuple(self.from_local(each, whole.placements, whole.shape, whole.stride()) for each in found)


class MissingConversion(PlainTarget):
    """Bug: on plain tensors, an operation uses partial values without reducing them."""

    def convert_argument(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """Bug: skip the reduction if the value is partial."""
        return value if any(map(reduction_of, value.placements)) else super().convert_argument(value, placements)


FAULTS: dict[str, type[DTensorTarget]] = {
    "doubled_backward": DoubledBackward,
    "dropped_all_reduce": DroppedAllReduce,
    "whole_addends": FullPartials,
    "swapped_rows": SwappedRows,
    "elementwise_rule": ElementwiseRule,
    "missing_conversion": MissingConversion,
}
"""Targets with a planted fault, by name."""
