"""Expected calls for `FullyShardedDataParallel`: flat parameters' all-gathers, gradient reductions, and the gradient norm."""

from __future__ import annotations

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.expected_calls.rank_view import Held, RankView
from equivcheck.layouts.base.expected_calls.shared import one_norm
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.layouts.parallelisms.fsdp1.flat_layout import alignment_of, flat_starts
from equivcheck.layouts.parallelisms.fsdp2.communication import UnitCalls
from equivcheck.layouts.parallelisms.fsdp2.units import Unit
from equivcheck.scenario import FSDP1, ShardingStrategy

NORM_BYTES = 4
"""Bytes in a norm over shards (one float32)."""

_FREED_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class FSDP1Calls(UnitCalls[FSDP1]):
    """Predicts the collective calls of `FullyShardedDataParallel`, in the order in which FSDP makes them."""

    def __init__(self, view: RankView, fsdp: FSDP1) -> None:
        super().__init__(view, fsdp)
        names = view.layout.axes_of(fsdp)
        self.parts, self.shard_axis = view.layout.mesh.size(names[-1]), view.axes(names[-1])
        self.replicas = view.axes(names[0]) if len(names) == 2 else None
        self.is_sharded = fsdp.strategy is not ShardingStrategy.NO_SHARD and self.parts > 1

    def totals(self) -> Totals:
        """Return the expected collective calls in all steps, including clipping by norm."""
        return super().totals() | (one_norm(self.view, self.shard_axis, NORM_BYTES) if self.is_sharded else {})

    def _forward(self, step: int) -> None:
        for unit in self.units:
            self._gather(unit, step)
            if not unit.is_root and self.fsdp.strategy in _FREED_AFTER_FORWARD:
                unit.gathered = False

    def _backward(self, step: int, last: bool) -> None:
        reduces = last or not self.fsdp.no_sync
        for unit in reversed(self.units):
            if self.view.differentiates(unit.last_layer, step):
                self._gather(unit, step)
            if reduces and any(held.trained for held in unit.held):
                self._reduce(unit, step)
            if self._frees(unit, step, reduces):
                unit.gathered = False

    def _frees(self, unit: Unit, step: int, reduces: bool) -> bool:
        """Whether a unit counts as resharded after backward.

        With use_orig_params, even a unit without gradients counts as resharded.
        """
        if self.fsdp.strategy in _FREED_AFTER_FORWARD:
            return True
        return reduces and (self.fsdp.use_orig_params or self.view.differentiates(unit.last_layer, step))

    def _gather(self, unit: Unit, step: int) -> None:
        if self.is_sharded and not unit.gathered:
            num_elements = chunk_size(self._num_flat(unit.held), self.parts)
            self.ledger.note(step, "all_gather", self.shard_axis, num_elements * self.gathered_bytes)
        unit.gathered = True

    def _reduce(self, unit: Unit, step: int) -> None:
        num_elements = self._num_flat(unit.held)
        if not self.is_sharded:
            self.ledger.note(step, "all_reduce.sum", self.shard_axis, num_elements * self.reduced_bytes)
            return
        shard = chunk_size(num_elements, self.parts) * self.reduced_bytes
        self.ledger.note(step, "reduce_scatter.sum", self.shard_axis, shard * self.parts)
        if self.replicas is not None:
            self.ledger.note(step, "all_reduce.sum", self.replicas, shard)

    def _num_flat(self, held: tuple[Held, ...]) -> int:
        """Count the elements in a flat parameter, including padding between and after parameters."""
        total = flat_starts([parameter.numel for parameter in held], alignment_of(self.view.training, self.fsdp))[-1]
        return chunk_size(total, self.parts) * self.parts if self.fsdp.use_orig_params else total


FSDP1_COMMUNICATION = CommunicationModel(
    calls=lambda view, fsdp: FSDP1Calls(view, fsdp).totals(),
)
