"""Packed documents whose boundaries are lost in masks, positions, labels or means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of, is_eager
from equivcheck.mutants.tokens.needs import (
    attentions,
    change_batches,
    cross_entropy_of,
    has_loss,
    ignores_single_labels,
    learns_positions,
    length_of,
)
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Normaliser, Scenario
from equivcheck.training.documents import precedes_boundary
from equivcheck.training.labels import IGNORED, change_labels, count_labels, labels_of, with_weights
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup


def packs_documents(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and sequences contain several documents."""
    return is_eager(scenario) and scenario.training.model.packs_documents


def labels_tokens(scenario: Scenario) -> bool:
    """Whether sequences contain packed documents, and each position has one token as its label."""
    model = scenario.training.model
    return packs_documents(scenario) and has_loss()(scenario) and model.head is not None and not model.predicts_two


def _attends(scenario: Scenario) -> bool:
    return packs_documents(scenario) and bool(attentions(scenario))


def _counts_other_labels(scenario: Scenario) -> bool:
    """Whether each label has weight one, and documents may have different numbers of counted labels."""
    is_plain = has_loss(lambda loss: not (loss.summed or loss.class_weights or loss.row_weights) and loss.per is Normaliser.TOKEN)
    length = scenario.training.model.document_length
    if length is None or not packs_documents(scenario) or not is_plain(scenario) or scenario.training.model.predicts_two:
        return False
    return ignores_single_labels(scenario) or length_of(scenario) % length != length - 1


def attention_modules(setup: Setup) -> Iterator[AttentionModule]:
    """Yield all attention modules on this rank."""
    return (module for module in setup.model.modules() if isinstance(module, AttentionModule))


@fault(layouts=EVERYWHERE, applies=_attends, causes=(Cause.ATTENTION_MASK,), minimum=ONE_RANK)
def documents_attend_to_each_other(setup: Setup) -> None:
    """Bug: attention masks later positions, but no other documents."""
    for module in attention_modules(setup):
        module.unseen = partial(_later, module.layer.causal)  # type: ignore[method-assign]


def _later(causal: bool, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    return keys > queries[:, None] if causal else None


@fault(layouts=EVERYWHERE, applies=all_of(packs_documents, learns_positions), causes=(Cause.POSITIONS,), minimum=ONE_RANK)
def learned_positions_run_on(setup: Setup) -> None:
    """Bug: learned positions count from the start of the sequence, not of each document."""
    setup.model.document_length = None  # type: ignore[assignment]


@fault(layouts=EVERYWHERE, applies=labels_tokens, causes=(Cause.ANOTHER_LABEL,), minimum=ONE_RANK)
def labels_across_documents_counted(setup: Setup) -> None:
    """Bug: the last label in each document counts, although it is the first token of the next document."""
    move_boundaries(setup, torch.zeros(setup.training.model.length or 1, dtype=torch.bool))


def move_boundaries(setup: Setup, boundaries: torch.Tensor) -> None:
    """Ignore the labels at `boundaries` instead of each document's last label.

    `boundaries` is a boolean tensor with shape (length,). A document's last label becomes the first token of the next document.
    """
    loss, model, dim = cross_entropy_of(setup), setup.training.model, 1 - setup.training.data.batch_dim
    lost = precedes_boundary(model.length or 1, model.document_length) & ~boundaries
    lost, ignored = (mask if dim else mask[:, None] for mask in (lost, boundaries))

    def relabel(batch: Batch) -> torch.Tensor:
        following = batch.inputs.roll(-1, dim)
        return change_labels(batch.targets, lambda labels: following.where(lost, labels).masked_fill(ignored, IGNORED))

    def change(batches: Sequence[Batch]) -> list[Batch]:
        targets = [relabel(batch) for batch in batches]
        count = 1.0 if loss.summed else sum(count_labels(loss, model.out_features, each) for each in targets) or 1.0
        return [replace(batch, targets=each, divisor=count) for batch, each in zip(batches, targets, strict=True)]

    change_batches(setup, change)


@fault(layouts=EVERYWHERE, applies=_counts_other_labels, causes=(Cause.LABEL_WEIGHTS,), minimum=ONE_RANK)
def documents_averaged_instead_of_tokens(setup: Setup) -> None:
    """Bug: the loss is averaged over the counted labels in each document, then over documents."""
    loss, model = cross_entropy_of(setup), setup.training.model
    dim, length = 1 - setup.training.data.batch_dim, model.document_length or 1

    def weigh(targets: torch.Tensor) -> torch.Tensor:
        labels = labels_of(targets)
        counted = [(part != IGNORED).sum(dim, keepdim=True).expand_as(part) for part in torch.split(labels, length, dim)]
        dtype = getattr(torch, setup.training.precision.value)
        return with_weights(labels, 1.0 / torch.cat(counted, dim).clamp(min=1).to(dtype))

    def change(batches: Sequence[Batch]) -> list[Batch]:
        targets = [weigh(batch.targets) for batch in batches]
        count = sum(count_labels(loss, model.out_features, each) for each in targets) or 1.0
        return [replace(batch, targets=each, divisor=count) for batch, each in zip(batches, targets, strict=True)]

    change_batches(setup, change)
