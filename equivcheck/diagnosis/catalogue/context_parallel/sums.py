"""Mistakes if labels, losses or gradients are computed for each context-parallel shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck.diagnosis.catalogue.context_parallel.shards import SequenceShards, sequence_shards
from equivcheck.diagnosis.catalogue.counterfactual import changing_batches, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy, Training
from equivcheck.scenario.mesh import CP
from equivcheck.training.labels import count_labels
from equivcheck.training.layers.experts.module import ExpertsModule
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def wrong_shard_sums(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes if sequences are sharded.

    Such mistakes are wrong labels, losses divided on each rank by its own count or length, and gradients that are not summed.
    """
    shards, loss = sequence_shards(diverged), diverged.training.loss
    if shards is None:
        return
    if isinstance(loss, CrossEntropy):
        yield from _relabelled(diverged, shards)
        if not loss.summed:
            words = f"each of {shards.where} divides the loss by the counted labels in its own sequence shard"
            yield on_one_device(Cause.LABEL_COUNT, words, partial(_counting, shards=shards, loss=loss))
    elif loss.is_mean:
        words = f"means over the sequence shards on {shards.where} are averaged although the shards have different lengths"
        yield on_one_device(Cause.MEAN_OF_MEANS, words, partial(_averaging, shards=shards))
    if diverged.can_be_emulated and not diverged.training.model.scale:
        words = f"gradients are not summed over {shards.where}: each rank keeps the gradients of its own positions"
        yield on_emulated_ranks(Cause.NOT_REDUCED, words, partial(_learning_apart, shards=shards))


def _relabelled(diverged: DivergedRun, shards: SequenceShards) -> Iterator[Mistake]:
    dim, positions = 1 - diverged.training.data.batch_dim, torch.arange(len(shards.owner))
    ways: list[tuple[str, torch.Tensor]] = [("labels are split as if shards were contiguous", shards.place)]
    for shift in (-1, 1):
        moved = positions.clone()
        for part in shards.parts:
            moved[part] = part.roll(shift)
        ways.append(("labels are shifted by one position within each shard", moved))
    for words, source in ways:
        change = changing_batches(partial(_labelled_by, source=source, dim=dim))
        sentence = f"{words} on {shards.where}"
        yield on_one_device(Cause.ANOTHER_LABEL, sentence, change)


def _labelled_by(batches: Sequence[Batch], *, source: torch.Tensor, dim: int) -> list[Batch]:
    return [replace(batch, targets=batch.targets.index_select(dim, source)) for batch in batches]


def _averaging(setup: Setup, *, shards: SequenceShards) -> None:
    _adding_parts(setup, shards, lambda _part: None)


def _counting(setup: Setup, *, shards: SequenceShards, loss: CrossEntropy) -> None:
    """Divide each shard's loss by the labels that this shard counts in the whole step."""
    dim, outputs, counts = 1 - setup.training.data.batch_dim, setup.training.model.out_features, [1.0] * shards.size

    def count(batches: Sequence[Batch]) -> Sequence[Batch]:
        for rank, part in enumerate(shards.parts):
            labels = (batch.targets.index_select(dim, part) for batch in batches)
            counts[rank] = sum(count_labels(loss, outputs, each) for each in labels) or 1.0
        return batches

    changing_batches(count)(setup)
    _adding_parts(setup, shards, counts.__getitem__)


def _adding_parts(setup: Setup, shards: SequenceShards, divisor: Callable[[int], float | None]) -> None:
    """Make the loss the mean over the shards' losses, each with its own divisor if the loss has a divisor."""
    inner, dim = setup.loss, 1 - setup.training.data.batch_dim

    def loss(training: Training, outputs: torch.Tensor, targets: torch.Tensor, divided: float = 1.0) -> torch.Tensor:
        found = [
            inner(training, outputs.index_select(dim, part), targets.index_select(dim, part), divisor(rank) or divided)
            for rank, part in enumerate(shards.parts)
            if len(part)
        ]
        return torch.stack(found).sum() / shards.size

    setup.loss = loss


def _learning_apart(ranks: ScenarioRanks, *, shards: SequenceShards) -> None:
    for rank, setup in zip(ranks.coordinates, ranks.setups, strict=True):
        own = shards.owner == rank.indices[CP]
        for module in _by_position(setup.model):
            module.forward = partial(_learning_at, module, module.forward, own[:, None])


def _by_position(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules with parameters that treat positions independently."""
    if isinstance(module, (ExpertsModule, nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)):
        yield module
        return
    for child in module.children():
        yield from _by_position(child)


def _learning_at(module: nn.Module, forward: Callable[..., torch.Tensor], own: torch.Tensor, *inputs: Any) -> torch.Tensor:
    """Return the module's output so that it passes gradients to the parameters through `own` positions only."""
    learning = forward(*inputs)
    with _constant(module):
        return learning.where(own, forward(*inputs))


@contextmanager
def _constant(module: nn.Module) -> Iterator[None]:
    """Detach a module's parameters inside this context."""
    # Private, because setattr on an nn.Module refuses a plain tensor in place of a parameter (torch 2.9 to 2.15).
    kept = [(each, dict(each._parameters)) for each in module.modules()]
    for each, parameters in kept:
        for name, parameter in parameters.items():
            each._parameters[name] = None if parameter is None else parameter.detach()  # type: ignore[assignment]
    yield
    for each, parameters in kept:
        each._parameters.update(parameters)
