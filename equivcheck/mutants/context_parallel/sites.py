"""Context-parallel attention in scenarios and setups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from equivcheck.layouts.base.positions import positions_of_ranks
from equivcheck.layouts.parallelisms.context_parallel.ranks import PositionRanks
from equivcheck.layouts.parallelisms.context_parallel.sequences import ShardedSequence
from equivcheck.mutants.needs import is_eager, layouts_with
from equivcheck.scenario import Attention, AttentionExchange, ContextParallel, Scenario
from equivcheck.scenario.mesh import CP
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.layers.module import LayerModule
from equivcheck.training.model import MLP
from equivcheck.training.setup import Setup

CONTEXT_PARALLEL = layouts_with(ContextParallel.tag)

Chosen = Callable[[Attention], bool]


def any_attention(_layer: Attention) -> bool:
    """Accept any attention layer."""
    return True


def is_causal(layer: Attention) -> bool:
    """Whether the layer has a causal mask."""
    return layer.causal


def is_sharded(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and sequences are split over several ranks."""
    return is_eager(scenario) and scenario.layout.mesh.size(CP) > 1 and (scenario.training.model.length or 1) > 1


def is_reordered(scenario: Scenario) -> bool:
    """Whether the ranks' shards, one after the other, are not in sequence order."""
    if not is_sharded(scenario):
        return False
    size, length = scenario.layout.mesh.size(CP), scenario.training.model.length or 1
    found = (positions_of_ranks(each, length, size) for each in scenario.layout.of(ContextParallel))
    return any([place for part in parts for place in part] != list(range(length)) for parts in found)


def has_attention(chosen: Chosen = any_attention, exchange: AttentionExchange | None = None) -> Callable[[Scenario], bool]:
    """Return a condition for scenarios: attention exchanges keys and values between context-parallel ranks.

    `exchange` is the kind of exchange, None for any. `chosen` selects attention layers.
    """

    def applies(scenario: Scenario) -> bool:
        exchanges = {each.exchange for each in scenario.layout.of(ContextParallel)}
        if not is_sharded(scenario) or not (exchange in exchanges if exchange else exchanges):
            return False
        return any(isinstance(layer, Attention) and chosen(layer) for layer in scenario.training.model.layers)

    return applies


def ranks_of(setup: Setup) -> PositionRanks | None:
    """Return the ranks over which each sequence is split.

    None if the current layout does not split sequences. The layout before a checkpoint may differ from the layout after it.
    """
    sequence = setup.model.sequence
    return sequence.ranks if isinstance(sequence, ShardedSequence) else None


def attentions(setup: Setup, chosen: Chosen = any_attention) -> Iterator[AttentionModule]:
    """Yield the attention modules that `chosen` accepts. Yields nothing if sequences are not split over ranks."""
    modules = setup.model.modules() if ranks_of(setup) is not None else ()
    return (module for module in modules if isinstance(module, AttentionModule) and chosen(module.layer))


def exchange_with(setup: Setup, kind: type[ShardedSequence]) -> None:
    """Let attention use `kind` for the exchange of keys and values between ranks."""
    ranks = ranks_of(setup)
    if ranks is not None:
        for module in setup.model.modules():
            if isinstance(module, (LayerModule, MLP)):
                module.sequence = kind(ranks)
