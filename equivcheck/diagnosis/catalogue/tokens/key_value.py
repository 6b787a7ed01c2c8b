"""Key and value heads that get gradients from some copies only, or with shifted positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch

from equivcheck.diagnosis.catalogue.counterfactual import Counterfactual, all_then_each, changing_layers, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.words import listed, over
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Attention
from equivcheck.scenario.mesh import TP
from equivcheck.training.layers.attention.module import AttentionModule, turned

Grouped = Callable[[int, torch.Tensor], torch.Tensor]
"""Repeats key or value heads; a head's copies are adjacent."""


def wrong_keys_and_values(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Faults in all attention layers, then in each."""
    layers = diverged.training.model.layers
    for chosen in all_then_each([index for index, layer in enumerate(layers) if isinstance(layer, Attention)]):
        which = [layer for index in chosen if isinstance(layer := layers[index], Attention)]
        if any(layer.heads > layer.kv_heads for layer in which):
            yield from _copied(diverged, chosen)
        if any(layer.rotary for layer in which):
            yield from _shifted(diverged, chosen)


def _named(layers: tuple[int, ...]) -> str:
    return listed([f"`layers.{layer}`" for layer in layers])


def _copied(diverged: DivergedRun, layers: tuple[int, ...]) -> Iterator[Counterfactual]:
    ways: tuple[tuple[str, Grouped], ...] = (
        ("the gradient of their first copy only", lambda copies, values: _learning(values, [True, *[False] * (copies - 1)])),
        ("the gradient of their last copy only", lambda copies, values: _learning(values, [*[False] * (copies - 1), True])),
        ("the mean gradient over their copies, not the sum", _averaged),
    )
    for how, group in ways:
        words = f"key and value heads in {_named(layers)} get {how}"
        yield on_one_device(diverged, Cause.KV_HEADS, words, changing_layers(layers, AttentionModule, partial(_grouping, group)))


def _learning(values: torch.Tensor, learns: list[bool]) -> torch.Tensor:
    return torch.stack([values if each else values.detach() for each in learns], -3).flatten(-4, -3)


def _averaged(copies: int, values: torch.Tensor) -> torch.Tensor:
    quiet = values.detach() + (values - values.detach()) / copies
    return quiet.repeat_interleave(copies, -3)


def _grouping(group: Grouped, module: AttentionModule) -> None:
    module.grouped = partial(group, module.layer.heads // module.layer.kv_heads)  # type: ignore[method-assign]


def _shifted(diverged: DivergedRun, layers: tuple[int, ...]) -> Iterator[Counterfactual]:
    ranks = diverged.mesh.size(TP)
    for rank in range(ranks if ranks > 1 else 0):
        for shift in (1, -1):
            where = f"the heads of rank {rank} of {over(diverged.mesh, (TP,))}"
            words = f"rotary positions of keys in {_named(layers)} are off by {shift} in {where}"
            change = changing_layers(layers, AttentionModule, partial(_placing, ranks, rank, shift))
            yield on_one_device(diverged, Cause.POSITIONS, words, change)


def _placing(ranks: int, rank: int, shift: int, module: AttentionModule) -> None:
    """Relies on order: the module places the query first, then the key."""
    turns = cycle((0, shift))
    if module.layer.rotary:
        module.placed = lambda values: _placed(ranks, rank, next(turns), values)  # type: ignore[method-assign]


def _placed(ranks: int, rank: int, shift: int, values: torch.Tensor) -> torch.Tensor:
    parts, places = values.chunk(ranks, -3), torch.arange(values.shape[-2])
    return torch.cat([turned(part, places + shift * (at == rank)) for at, part in enumerate(parts)], -3)
