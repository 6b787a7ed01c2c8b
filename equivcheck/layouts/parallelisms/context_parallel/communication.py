"""Expected calls for context parallelism: exchanges of keys and values, their gradients, and parameter gradient sums."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.expected_calls.passes import Passes
from equivcheck.layouts.base.expected_calls.rank_view import Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import gradient_reductions
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.base.positions import longest_part, own_length
from equivcheck.scenario import AttentionExchange, ContextParallel, PlannedParallelism, Split
from equivcheck.scenario.mesh import CP, TP
from equivcheck.training.layers.facts import AttentionShape
from equivcheck.training.layers.registry import layer_kind


class ContextParallelCalls:
    """Predicts the collective calls of all attention layers in each step."""

    def __init__(self, view: RankView, parallelism: ContextParallel) -> None:
        self.view = view
        self.size, self.axes = view.layout.mesh.size(CP), view.axes(CP)
        length = view.training.model.length or 0
        self.length, self.longest = length, longest_part(parallelism, length, self.size)
        self.own = own_length(view) or 0
        self.exchange = {
            AttentionExchange.GATHER: self._gathered,
            AttentionExchange.ULYSSES: self._by_heads,
            AttentionExchange.RING: self._round_trips,
        }[parallelism.exchange]
        self.ledger = Ledger()

    def totals(self) -> Totals:
        """Expected collective calls in the whole training."""
        if self.size > 1:
            for step in range(self.view.training.steps):
                for passes in self.view.passes_at(step):
                    self._layers(passes)
        return self.ledger.totals

    def _layers(self, passes: Passes) -> None:
        for index in passes.span.layers:
            layer = self.view.training.model.layers[index]
            attention_shape = self._held(index, layer_kind(layer).attention_shape(layer))
            if attention_shape is not None:
                # Recomputation repeats the exchange, because the layer computes its output after it.
                differentiates = self.view.is_differentiated(index, passes)
                recomputed = self.view.layout.execution.checkpoints(index) and differentiates
                forwards, backwards = (1 + recomputed) * passes.times, differentiates * passes.times
                self.exchange(passes.step, attention_shape, passes.rows, forwards, backwards)

    def _held(self, index: int, attention_shape: AttentionShape | None) -> AttentionShape | None:
        """Return this rank's heads, if tensor parallelism splits heads."""
        plans = self.view.layout.of(PlannedParallelism)
        if attention_shape is None or not plans or plans[0].plan[index].split is not Split.HEADS_OR_HIDDEN:
            return attention_shape
        share = chunk_sizes(attention_shape.num_kv_heads, self.view.layout.mesh.size(TP))[self.view.index(TP)]
        return replace(
            attention_shape, num_heads=attention_shape.num_heads // attention_shape.num_kv_heads * share, num_kv_heads=share
        )

    def _block(self, attention_shape: AttentionShape, rows: int) -> int:
        """Return the bytes in this rank's keys and values, padded to the longest shard."""
        return 2 * rows * attention_shape.num_kv_heads * self.longest * attention_shape.width * self.view.item_bytes

    def _gathered(self, step: int, attention_shape: AttentionShape, rows: int, forwards: int, backwards: int) -> None:
        """Count one all-gather for keys and values, and one reduce-scatter for their gradients."""
        own = self._block(attention_shape, rows)
        self._note(step, "all_gather", own, forwards)
        self._note(step, "reduce_scatter.sum", own * self.size, backwards)

    def _by_heads(self, step: int, attention_shape: AttentionShape, rows: int, forwards: int, backwards: int) -> None:
        """Count two all-to-alls: positions to heads for queries, keys and values, and back for the output.

        Backward reverses them.
        """
        group = attention_shape.num_heads // max(attention_shape.num_kv_heads, 1)
        share = chunk_sizes(attention_shape.num_kv_heads, self.size)[self.view.index(CP)]
        of_one = rows * attention_shape.width * self.view.item_bytes
        positions, heads = attention_shape.num_kv_heads * self.own * of_one, share * self.length * of_one
        for times, there, back in ((forwards, group + 2, group), (backwards, group, group + 2)):
            self._note(step, "all_to_all", there * positions, times)
            self._note(step, "all_to_all", back * heads, times)

    def _round_trips(self, step: int, attention_shape: AttentionShape, rows: int, forwards: int, backwards: int) -> None:
        """Count the sends of keys and values to all other ranks.

        In backward, gradients travel with them and then return to the owner.
        """
        block, turns = self._block(attention_shape, rows), self.size - 1
        for op in ("send", "recv"):
            self._note(step, op, block, forwards * turns)
            self._note(step, op, 2 * block, backwards * turns)
            self._note(step, op, block, backwards)

    def _note(self, step: int, op: str, num_bytes: int, times: int) -> None:
        if times:
            self.ledger.note(step, op, self.axes, num_bytes * times, times)


def _all_calls(view: RankView, parallelism: ContextParallel) -> Totals:
    sums = gradient_reductions(view, CP, view.held) if view.layout.mesh.size(CP) > 1 else {}
    return ContextParallelCalls(view, parallelism).totals() | sums


CONTEXT_PARALLEL_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    uneven=lambda _parallelism: True,
    sends_shards=True,
)
