"""Faults planted in what ranks do of a program, as a checker is checked by what it must find."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from equivcheck.programs.nouns.placement import REPLICATE, reduction_of
from equivcheck.programs.nouns.statements import Operation
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.one_device import Outputs
from equivcheck.programs.run.plain.rules import ALONG_A_DIM
from equivcheck.programs.run.plain.target import PlainTarget
from equivcheck.programs.run.rank import DTensorTarget


class DoubledBackward(DTensorTarget):
    """The backward of a redistribution gives twice the gradient."""

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """As it should be, but for the backward."""
        moved = super().redistribute(value, placements)
        if moved.requires_grad:
            moved.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return moved


class DroppedAllReduce(DTensorTarget):
    """A redistribution takes addends for the whole, without reducing them."""

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """As it should be, but for addends."""
        kept = [Replicate() if each.is_partial() else each for each in value.placements]
        if kept == list(value.placements):
            return super().redistribute(value, placements)
        return super().redistribute(self.from_local(value.to_local(), kept, value.shape, value.stride()), placements)


class WholeAddends(DTensorTarget):
    """What becomes addends of a sum keeps its value on all ranks."""

    def distribute(self, full: torch.Tensor, placements: tuple[str, ...]) -> torch.Tensor:
        """As it should be, but each addend is the whole."""
        whole = tuple(REPLICATE if reduction_of(each) == "sum" else each for each in placements)
        tensor: Any = super().distribute(full, whole)
        kept = super().distribute(torch.zeros_like(full), placements)
        assert isinstance(kept, DTensor)
        return self.from_local(tensor.to_local(), kept.placements, full.shape, full.stride())


class SwappedRows(DTensorTarget):
    """A move from one cut dim to another leaves the rows of each rank in the opposite order."""

    def redistribute(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """As it should be, but for the order."""
        moved = super().redistribute(value, placements)
        assert isinstance(moved, DTensor)
        pairs = zip(value.placements, moved.placements, strict=True)
        if not any(isinstance(one, Shard) and isinstance(other, Shard) and one != other for one, other in pairs):
            return moved
        return self.from_local(moved.to_local().flip(0), moved.placements, moved.shape, moved.stride())


class ElementwiseRule(DTensorTarget):
    """Operations along a dim, as softmax, have the rule of a clone: each rank does them with its own part."""

    planted_in: ClassVar[frozenset[str]] = frozenset(ALONG_A_DIM)

    def call(self, statement: Operation, arguments: list[torch.Tensor]) -> Outputs:
        """As it should be, but for those."""
        if statement.name not in self.planted_in:
            return super().call(statement, arguments)
        whole: Any = arguments[0]
        found = results_of(statement.name, [whole.to_local()], statement.dim)
        return tuple(self.from_local(each, whole.placements, whole.shape, whole.stride()) for each in found)


class MissingConversion(PlainTarget):
    """On plain tensors an operation takes addends for the whole."""

    def needed(self, value: Any, placements: tuple[str, ...]) -> torch.Tensor:
        """As it should be, but for addends."""
        return value if any(map(reduction_of, value.lies)) else super().needed(value, placements)


FAULTS: dict[str, type[DTensorTarget]] = {
    "doubled_backward": DoubledBackward,
    "dropped_all_reduce": DroppedAllReduce,
    "whole_addends": WholeAddends,
    "swapped_rows": SwappedRows,
    "elementwise_rule": ElementwiseRule,
    "missing_conversion": MissingConversion,
}
"""By name."""
