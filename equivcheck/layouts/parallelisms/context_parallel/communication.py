"""Expected calls for context parallelism: exchanges of keys and values, their gradients, and parameter gradient sums."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.expected_calls.communication import Totals
from equivcheck.layouts.base.expected_calls.model import CommunicationModel
from equivcheck.layouts.base.expected_calls.rank_view import Ledger, RankView
from equivcheck.layouts.base.expected_calls.shared import sums_of_gradients
from equivcheck.layouts.base.partition import chunk_sizes
from equivcheck.layouts.base.positions import longest_part, own_length
from equivcheck.scenario import ContextParallel, Exchange, PlannedParallelism, Split
from equivcheck.scenario.mesh import CP, TP
from equivcheck.training.layers.facts import Looking
from equivcheck.training.layers.registry import kind_of


class ContextParallelCalls:
    """Counts attention layers' exchanges in each step."""

    def __init__(self, view: RankView, parallelism: ContextParallel) -> None:
        self.view = view
        self.size, self.axes = view.layout.mesh.size(CP), view.axes(CP)
        length = view.training.model.length or 0
        self.length, self.longest = length, longest_part(parallelism, length, self.size)
        self.own = own_length(view) or 0
        self.exchange = {
            Exchange.GATHER: self._gathered,
            Exchange.ULYSSES: self._by_heads,
            Exchange.RING: self._round_trips,
        }[parallelism.exchange]
        self.ledger = Ledger()

    def totals(self) -> Totals:
        """All calls in the training."""
        if self.size > 1:
            for step in range(self.view.training.steps):
                for microbatch in self.view.training.data.microbatches:
                    self._layers(step, microbatch // self.view.layout.num_data_ranks)
        return self.ledger.totals

    def _layers(self, step: int, rows: int) -> None:
        for index, layer in enumerate(self.view.training.model.layers):
            looking = self._held(index, kind_of(layer).looking(layer))
            if looking is not None:
                # Recomputation repeats the exchange, because the layer computes its output after it.
                differentiates = self.view.differentiates(index, step)
                recomputed = self.view.layout.execution.checkpoints(index) and differentiates
                self.exchange(step, looking, rows, 1 + recomputed, int(differentiates))

    def _held(self, index: int, looking: Looking | None) -> Looking | None:
        """This rank's heads if tensor parallelism splits heads."""
        plans = self.view.layout.of(PlannedParallelism)
        if looking is None or not plans or plans[0].plan[index].split is not Split.WITHIN:
            return looking
        share = chunk_sizes(looking.kv_heads, self.view.layout.mesh.size(TP))[self.view.index(TP)]
        return replace(looking, heads=looking.heads // looking.kv_heads * share, kv_heads=share)

    def _block(self, looking: Looking, rows: int) -> int:
        """Bytes in this rank's keys and values, padded to the longest shard."""
        return 2 * rows * looking.kv_heads * self.longest * looking.width * self.view.item_bytes

    def _gathered(self, step: int, looking: Looking, rows: int, forwards: int, backwards: int) -> None:
        """One all-gather for keys and values, one reduce-scatter for their gradients."""
        own = self._block(looking, rows)
        self._note(step, "all_gather", own, forwards)
        self._note(step, "reduce_scatter.sum", own * self.size, backwards)

    def _by_heads(self, step: int, looking: Looking, rows: int, forwards: int, backwards: int) -> None:
        """Two all-to-alls: positions to heads for queries, keys and values, and back for the output. Backward reverses them."""
        group = looking.heads // max(looking.kv_heads, 1)
        share = chunk_sizes(looking.kv_heads, self.size)[self.view.index(CP)]
        of_one = rows * looking.width * self.view.item_bytes
        positions, heads = looking.kv_heads * self.own * of_one, share * self.length * of_one
        for times, there, back in ((forwards, group + 2, group), (backwards, group, group + 2)):
            self._note(step, "all_to_all", there * positions, times)
            self._note(step, "all_to_all", back * heads, times)

    def _round_trips(self, step: int, looking: Looking, rows: int, forwards: int, backwards: int) -> None:
        """Keys and values visit all other ranks. In backward their gradients travel with them and then return to the owner."""
        block, turns = self._block(looking, rows), self.size - 1
        for op in ("send", "recv"):
            self._note(step, op, block, forwards * turns)
            self._note(step, op, 2 * block, backwards * turns)
            self._note(step, op, block, backwards)

    def _note(self, step: int, op: str, num_bytes: int, times: int) -> None:
        if times:
            self.ledger.note(step, op, self.axes, num_bytes * times, times)


def _all_calls(view: RankView, parallelism: ContextParallel) -> Totals:
    sums = sums_of_gradients(view, CP, view.held) if view.layout.mesh.size(CP) > 1 else {}
    return ContextParallelCalls(view, parallelism).totals() | sums


CONTEXT_PARALLEL_COMMUNICATION = CommunicationModel(
    calls=_all_calls,
    uneven=lambda _parallelism: True,
    sends_shards=True,
)
