"""Mistakes in attention between context-parallel shards: wrong masks, positions, softmax or gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from equivcheck.diagnosis.catalogue.context_parallel.shards import SequenceShards, attention_layers, sequence_shards
from equivcheck.diagnosis.catalogue.counterfactual import changing_layers, on_one_device, submodule
from equivcheck.diagnosis.catalogue.tokens.attention import Alter, replace_mask, replace_positions
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import AttentionExchange, ContextParallel
from equivcheck.training.documents import places_in_documents
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.setup import Setup


def wrong_sequence_attention(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in attention. Each is tried in all attention layers, then in each layer alone."""
    shards = sequence_shards(diverged)
    if shards is None:
        return
    yield from _counted(diverged, shards)
    for layers in attention_layers(diverged, causal=True):
        for words, unseen in _masks(shards):
            yield _fault(Cause.ATTENTION_MASK, layers, words, partial(replace_mask, unseen=unseen))
    for layers in attention_layers(diverged):
        for words, hidden in _hidden(shards):
            yield _fault(Cause.ATTENTION_MASK, layers, words, partial(_seeing_less, hidden=hidden))
        for words, learning in _learning(shards):
            yield _fault(Cause.KEY_VALUE_GRADIENT, layers, words, partial(_learning_from, learning=learning))
        if any(each.exchange is AttentionExchange.RING for each in diverged.layout.of(ContextParallel)):
            words = f"does not rescale earlier blocks on the ring of {shards.where} if a later block has a larger score"
            yield _fault(Cause.SOFTMAX_OF_PART, layers, words, partial(_unscaled, shards=shards))
        yield from _of_heads(diverged, shards, layers)


def _fault(cause: Cause, layers: tuple[int, ...], words: str, alter: Alter) -> Mistake:
    change = changing_layers(layers, AttentionModule, alter)
    return on_one_device(cause, f"attention in {layers_by_name(layers)} {words}", change)


def _counted(diverged: DivergedRun, shards: SequenceShards) -> Iterator[Mistake]:
    source, document_length = diverged.training.model.source, diverged.training.model.document_length
    for shard_places, how in ((shards.local, "from the start of each shard"), (shards.place, "as if shards were contiguous")):
        way, places = f"{how} on {shards.where}", places_in_documents(shard_places, document_length)
        if source is not None and source.learned_positions:
            yield on_one_device(Cause.POSITIONS, f"learned positions are counted {way}", partial(_embedding, places=places))
        for layers in attention_layers(diverged, rotary=True):
            yield _fault(Cause.POSITIONS, layers, f"counts rotary positions {way}", partial(replace_positions, positions=places))


def _embedding(setup: Setup, *, places: torch.Tensor) -> None:
    submodule(setup, "positions", nn.Embedding).register_forward_pre_hook(lambda _module, _inputs: (places,))


def _masks(shards: SequenceShards) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield, for each fault, which keys (columns) are masked for each query (rows)."""
    everywhere, parts = torch.arange(len(shards.owner)), f"the sequence shards on {shards.where}"
    order = f"as if the sequence shards on {shards.where} were contiguous"
    for queries, keys, words in (
        (shards.place, shards.place, f"masks keys and queries {order}"),
        (everywhere, shards.place, f"masks keys {order}"),
        (shards.place, everywhere, f"masks queries {order}"),
        (shards.local, everywhere, f"masks by the queries' index in {parts} and the keys' index in the sequence"),
        (everywhere, shards.local, f"masks by the keys' index in {parts} and the queries' index in the sequence"),
        (shards.local, shards.local, f"masks by the index in {parts}: every block of keys gets the mask of a rank's own block"),
    ):
        yield words, keys > queries[:, None]


def _hidden(shards: SequenceShards) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield, for each fault, which keys are hidden in addition to those in the mask."""
    turns = (shards.owner[:, None] - shards.owner) % shards.size
    yield f"sees only keys in the same sequence shard on {shards.where}", turns != 0
    yield f"does not see the block that comes last on the ring of {shards.where}", turns == shards.size - 1
    if shards.size > 2:
        yield f"does not see the block that comes first on the ring of {shards.where}", turns == 1


def _seeing_less(module: AttentionModule, *, hidden: torch.Tensor) -> None:
    replace_mask(module, hidden | _unseen(module, len(hidden)))


def _unseen(module: AttentionModule, length: int) -> torch.Tensor:
    positions = torch.arange(length)
    unseen = module.unseen(positions, positions)
    return torch.zeros(length, length, dtype=torch.bool) if unseen is None else unseen


def _learning(shards: SequenceShards) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield, for each fault, from which queries keys and values get gradients. Shape: (queries, keys)."""
    turns = (shards.owner[:, None] - shards.owner) % shards.size
    whose = {0: "their own rank", 1: "the rank after theirs"} | {shards.size - 1: "the rank before theirs"}
    for distance, which in whose.items():
        words = f"passes gradients to keys and values from queries on {which} only, not from all of {shards.where}"
        yield words, turns == distance


def _learning_from(module: AttentionModule, *, learning: torch.Tensor) -> None:
    unseen = _unseen(module, len(learning))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        fixed, scale = key.detach(), query.shape[-1] ** -0.5
        scores = torch.where(learning, query @ key.mT, query @ fixed.mT) * scale
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        found: torch.Tensor = (weights * learning) @ value + (weights * ~learning) @ value.detach()
        return found

    module.attend = attend  # type: ignore[method-assign]


def _unscaled(module: AttentionModule, *, shards: SequenceShards) -> None:
    """Bug: blocks are not rescaled.

    They are visited in ring order: a rank's own block first, then the previous rank's, and so on.
    """
    unseen = _unseen(module, len(shards.owner))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(unseen, -torch.inf)
        exponentials = torch.zeros_like(scores)
        for rank, own in enumerate(shards.parts):
            largest = torch.full_like(scores[..., own, :1], -torch.inf)
            for turn in range(shards.size if len(own) else 0):
                block = shards.parts[rank - turn]
                of_block = scores[..., own, :][..., block]
                largest = torch.cat((largest, of_block.detach()), -1).amax(-1, keepdim=True)
                place = torch.zeros_like(unseen).index_put((own[:, None], block), torch.tensor(True))
                exponentials = exponentials.masked_scatter(place, (of_block - largest).exp())
        return (exponentials / exponentials.sum(-1, keepdim=True)) @ value

    module.attend = attend  # type: ignore[method-assign]


def _of_heads(diverged: DivergedRun, shards: SequenceShards, layers: tuple[int, ...]) -> Iterator[Mistake]:
    if not any(each.exchange is AttentionExchange.ULYSSES for each in diverged.layout.of(ContextParallel)):
        return
    for sign, where in ((1, "after"), (-1, "before")):
        words = f"treats the heads from each of {shards.where} as the heads of the rank {where} it"
        yield _fault(Cause.PERMUTED, layers, words, partial(_moving_heads, sign=sign, ranks=shards.size))


def _moving_heads(module: AttentionModule, *, sign: int, ranks: int) -> None:
    honest, layer = module.attend, module.layer
    shift = sign * chunk_size(layer.num_kv_heads, ranks) * layer.num_heads // layer.num_kv_heads
    module.attend = lambda *given: honest(*given).roll(shift, -3)  # type: ignore[method-assign]
