"""Mistakes in attention: wrong masks, positions, or key and value heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
from torch.nn import functional

from equivcheck.diagnosis.catalogue.counterfactual import Change, all_then_each, changing_layers, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.layouts.base.plan.layers import PlannedLayer, planned_layers
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Attention
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.attention.module import AttentionModule, attention, rotate

Alter = Callable[[AttentionModule], None]
"""Function to plant a fault in an attention module."""


def wrong_attention(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in attention. Each is tried in all layers that can have it, then in each layer alone."""
    if diverged.rounding is not None:
        return
    layers = planned_layers(diverged.training.model, diverged.layout)
    found = [place for place in layers if isinstance(place.site.layer, Attention)]
    for causal in all_then_each([place for place in found if _layer(place).causal]):
        yield _fault(Cause.ATTENTION_MASK, causal, "sees later positions as well", _forget_order)
    for turning in all_then_each([place for place in found if _layer(place).rotary and place.num_parts > 1]):
        yield from _of_turned(diverged, turning)
    for causal in all_then_each([place for place in found if _layer(place).causal and place.num_parts > 1]):
        yield from _of_masked(diverged, causal)
    for grouped in all_then_each([place for place in found if _layer(place).num_heads > _layer(place).num_kv_heads]):
        yield from _of_grouped(diverged, grouped)


def _layer(place: PlannedLayer) -> Attention:
    layer = place.site.layer
    assert isinstance(layer, Attention), "only attention layers are selected"
    return layer


def _named(places: Sequence[PlannedLayer]) -> str:
    return f"attention in {layers_by_name(place.site.index for place in places)}"


def _fault(cause: Cause, places: Sequence[PlannedLayer], words: str, alter: Alter) -> Mistake:
    return on_one_device(cause, f"{_named(places)} {words}", _altering(places, alter))


def _altering(places: Sequence[PlannedLayer], alter: Alter) -> Change:
    return changing_layers([place.site.index for place in places], AttentionModule, alter)


def replace_mask(module: AttentionModule, unseen: torch.Tensor | None) -> None:
    """Change an attention module: it masks the keys for which `unseen` is True. None for no mask."""
    module.attend = lambda query, key, value: attention(query, key, value, unseen)  # type: ignore[method-assign]


def _forget_order(module: AttentionModule) -> None:
    """Let queries see all keys in their document."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(query.shape[-2])
        return attention(query, key, value, module.hide_other_documents(None, positions, positions))

    module.attend = attend  # type: ignore[method-assign]


def _of_masked(diverged: DivergedRun, places: Sequence[PlannedLayer]) -> Iterator[Mistake]:
    positions, length = torch.arange(places[0].site.model.length or 1), places[0].part_length
    words = f"masks queries or keys by their index in the sequence shards on {diverged.ranks_text((TP,))}"
    for unseen in (positions > (positions % length)[:, None], positions % length > positions[:, None]):
        yield _fault(Cause.ATTENTION_MASK, places, words, partial(replace_mask, unseen=unseen))
    unseen = (positions > positions[:, None]) | (positions // length != (positions // length)[:, None])
    words = f"sees only keys in the same sequence shard on {diverged.ranks_text((TP,))}"
    yield _fault(Cause.ATTENTION_MASK, places, words, partial(replace_mask, unseen=unseen))


def _of_turned(diverged: DivergedRun, places: Sequence[PlannedLayer]) -> Iterator[Mistake]:
    positions, length, ranks = torch.arange(places[0].site.model.length or 1), places[0].part_length, places[0].num_parts
    words = f"counts rotary positions from the start of each sequence shard on {diverged.ranks_text((TP,))}"
    yield _fault(Cause.POSITIONS, places, words, partial(replace_positions, positions=positions % length))
    for part in range(ranks - 1, 0, -1):
        for shift in (1, -1):
            amount = "high" if shift > 0 else "low"
            words = f"counts rotary positions one too {amount} from tensor-parallel rank {part} on"
            moved = positions + shift * (positions // length >= part)
            yield _fault(Cause.POSITIONS, places, words, partial(replace_positions, positions=moved))


def replace_positions(module: AttentionModule, positions: torch.Tensor) -> None:
    """Change an attention module: it uses `positions` for its rotary embedding."""
    module.with_rotary = lambda values: rotate(values, positions)  # type: ignore[method-assign]


def _of_grouped(diverged: DivergedRun, places: Sequence[PlannedLayer]) -> Iterator[Mistake]:
    ranks = diverged.mesh.size(TP)
    words = "repeats key and value heads in the wrong order, so query heads use the wrong ones"
    for shards in dict.fromkeys((1, ranks)):
        if all(_layer(place).num_kv_heads % shards == 0 for place in places):
            yield _fault(Cause.KV_HEADS, places, words, partial(_repeating, shards=shards))
    if ranks > 1 and all(_layer(place).num_heads % ranks == 0 for place in places):
        where = diverged.ranks_text((TP,))
        words = f"{_named(places)} does not sum the gradients of replicated key and value heads over {where}"
        yield on_emulated_ranks(Cause.KV_HEADS, words, partial(_learning_apart, places=places, ranks=ranks))


def _repeating(module: AttentionModule, shards: int) -> None:
    """Bug: heads of each shard are repeated together, not each head by itself."""
    groups = module.layer.num_heads // module.layer.num_kv_heads
    module.repeat_kv_heads = lambda values: torch.cat(  # type: ignore[method-assign]
        [torch.cat([shard] * groups, -3) for shard in values.chunk(shards, -3)], -3
    )


def _learning_apart(emulated: ScenarioRanks, places: Sequence[PlannedLayer], ranks: int) -> None:
    for rank, setup in zip(emulated.coordinates, emulated.setups, strict=True):
        _altering(places, partial(_learning_from_own, ranks=ranks, rank=rank.indices[TP]))(setup)


def _learning_from_own(module: AttentionModule, ranks: int, rank: int) -> None:
    """Bug: key and value get gradients through one rank's query heads only. The gradient for their input stays complete."""
    groups, own = module.layer.num_heads // module.layer.num_kv_heads, module.layer.num_heads // ranks
    kept = slice(rank * own, (rank + 1) * own)
    for linear in (module.key, module.value):
        linear.forward = partial(_both, linear)  # type: ignore[method-assign]

    def repeat_heads(values: torch.Tensor) -> torch.Tensor:
        fixed, learning = (half.repeat_interleave(groups, -3) for half in values.chunk(2, -3))
        part = learning[:, kept] - learning[:, kept].detach()
        return torch.cat((fixed[:, : kept.start], fixed[:, kept] + part, fixed[:, kept.stop :]), 1)

    module.repeat_kv_heads = repeat_heads  # type: ignore[method-assign]


def _both(linear: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """Return two copies of the heads: one passes gradients to the input only, the other copy to the parameters only."""
    bias = None if linear.bias is None else linear.bias.detach()
    fixed = functional.linear(inputs, linear.weight.detach(), bias)
    return torch.cat((fixed, functional.linear(inputs.detach(), linear.weight, linear.bias)), -1)


Grouped = Callable[[int, torch.Tensor], torch.Tensor]
"""Function to repeat key or value heads; a head's copies are adjacent."""


def wrong_keys_and_values(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in attention: wrong gradients of shared key-value heads, or wrong rotary positions of keys.

    Each is tried in all layers, then in each layer alone.
    """
    layers = diverged.training.model.layers
    for chosen in all_then_each([index for index, layer in enumerate(layers) if isinstance(layer, Attention)]):
        which = [layer for index in chosen if isinstance(layer := layers[index], Attention)]
        if any(layer.num_heads > layer.num_kv_heads for layer in which):
            yield from _copied(chosen)
        if any(layer.rotary for layer in which):
            yield from _shifted(diverged, chosen)


def _copied(layers: tuple[int, ...]) -> Iterator[Mistake]:
    ways: tuple[tuple[str, Grouped], ...] = (
        ("the gradient of their first copy only", lambda copies, values: _learning(values, [True, *[False] * (copies - 1)])),
        ("the gradient of their last copy only", lambda copies, values: _learning(values, [*[False] * (copies - 1), True])),
        ("the mean gradient over their copies, not the sum", _averaged),
    )
    for how, group in ways:
        words = f"key and value heads in {layers_by_name(layers)} get {how}"
        yield on_one_device(Cause.KV_HEADS, words, changing_layers(layers, AttentionModule, partial(_grouping, group)))


def _learning(values: torch.Tensor, learns: list[bool]) -> torch.Tensor:
    return torch.stack([values if each else values.detach() for each in learns], -3).flatten(-4, -3)


def _averaged(copies: int, values: torch.Tensor) -> torch.Tensor:
    quiet = values.detach() + (values - values.detach()) / copies
    return quiet.repeat_interleave(copies, -3)


def _grouping(group: Grouped, module: AttentionModule) -> None:
    module.repeat_kv_heads = partial(group, module.layer.num_heads // module.layer.num_kv_heads)  # type: ignore[method-assign]


def _shifted(diverged: DivergedRun, layers: tuple[int, ...]) -> Iterator[Mistake]:
    ranks = diverged.mesh.size(TP)
    for rank in range(ranks if ranks > 1 else 0):
        for shift in (1, -1):
            where = f"the heads of rank {rank} of {diverged.ranks_text((TP,))}"
            words = f"rotary positions of keys in {layers_by_name(layers)} are off by {shift} in {where}"
            change = changing_layers(layers, AttentionModule, partial(_placing, ranks, rank, shift))
            yield on_one_device(Cause.POSITIONS, words, change)


def _placing(ranks: int, rank: int, shift: int, module: AttentionModule) -> None:
    """Shift rotary positions for the query or the key. The module must place the query first, then the key."""
    turns = cycle((0, shift))
    if module.layer.rotary:
        module.with_rotary = lambda values: _placed(ranks, rank, next(turns), values)  # type: ignore[method-assign]


def _placed(ranks: int, rank: int, shift: int, values: torch.Tensor) -> torch.Tensor:
    parts, places = values.chunk(ranks, -3), torch.arange(values.shape[-2])
    return torch.cat([rotate(part, places + shift * (at == rank)) for at, part in enumerate(parts)], -3)
