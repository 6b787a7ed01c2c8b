"""Mistakes with packed documents: their boundaries are lost, or counted from the start of a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.context_parallel.shards import SequenceShards, attention_layers, sequence_shards
from equivcheck.diagnosis.catalogue.counterfactual import changing_batches, changing_layers, on_one_device
from equivcheck.diagnosis.catalogue.tokens.attention import replace_mask
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.documents import in_other_documents, precedes_boundary
from equivcheck.training.labels import IGNORED, change_labels, count_labels, labels_of, weights_of, with_weights
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

Relabel = Callable[[Batch], torch.Tensor]
"""Computes a microbatch's targets."""


def wrong_documents(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes with packed documents: attention, positions or labels cross the boundary between two documents."""
    model = diverged.training.model
    if not model.packs_documents:
        return
    if diverged.rounding is None:
        yield from _seen(diverged)
        if model.source is not None and model.source.learned_positions:
            words = "learned positions count from the start of the sequence, not of each document"
            yield on_one_device(Cause.POSITIONS, words, _run_on)
    if isinstance(diverged.training.loss, CrossEntropy) and not model.predicts_two:
        yield from _labelled(diverged, diverged.training.loss)


def _run_on(setup: Setup) -> None:
    setup.model.document_length = None  # type: ignore[assignment]


def _seen(diverged: DivergedRun) -> Iterator[Mistake]:
    """Attention layers without documents, or with documents counted in shards."""
    model, shards = diverged.training.model, sequence_shards(diverged)
    positions = torch.arange(model.length or 1)
    ways = [("sees other documents in the same sequence", torch.zeros(len(positions), len(positions), dtype=torch.bool))]
    if shards is not None and model.document_length is not None:
        counted = f"from the start of its sequence shard on {shards.where}"
        hidden = partial(in_other_documents, shards.local, document_length=model.document_length)
        ways.append((f"counts the documents of queries {counted}", hidden(positions)))
        ways.append((f"counts the documents of queries and keys {counted}", hidden(shards.local)))
    for layers in attention_layers(diverged):
        for words, others in ways:
            change = changing_layers(layers, AttentionModule, partial(_hiding, others=others))
            yield on_one_device(Cause.ATTENTION_MASK, f"attention in {layers_by_name(layers)} {words}", change)


def _hiding(module: AttentionModule, *, others: torch.Tensor) -> None:
    positions = torch.arange(len(others))
    replace_mask(module, others | (positions > positions[:, None]) if module.layer.causal else others)


def _labelled(diverged: DivergedRun, loss: CrossEntropy) -> Iterator[Mistake]:
    """Labels at other boundaries, and means over documents."""
    training, shards = diverged.training, sequence_shards(diverged)

    def fault(cause: Cause, words: str, relabel: Relabel) -> Mistake:
        return on_one_device(cause, words, changing_batches(partial(_counted, relabel=relabel, training=training, loss=loss)))

    if training.model.head is not None:
        words = "the label before each boundary counts: it is the first token of the next document"
        none = torch.zeros(training.model.length or 1, dtype=torch.bool)
        yield fault(Cause.ANOTHER_LABEL, words, partial(_moved, training=training, boundaries=none))
        if shards is not None:
            words = f"labels are ignored before boundaries counted from the start of each sequence shard on {shards.where}"
            boundaries = _boundaries_in(shards, training.model.document_length or 1)
            yield fault(Cause.ANOTHER_LABEL, words, partial(_moved, training=training, boundaries=boundaries))
    if not (loss.summed or loss.weighs_labels or loss.class_weights):
        words = "the loss is averaged over documents, each by its counted labels, not over all tokens"
        yield fault(Cause.LABEL_WEIGHTS, words, partial(_by_document, training=training))


def _boundaries_in(shards: SequenceShards, length: int) -> torch.Tensor:
    """Mask of the positions that precede a boundary counted in their shard."""
    found = torch.zeros(len(shards.owner), dtype=torch.bool)
    for part in shards.parts:
        found[part] = precedes_boundary(len(part), length)
    return found


def _counted(batches: Sequence[Batch], *, relabel: Relabel, training: Training, loss: CrossEntropy) -> list[Batch]:
    """Microbatches with other targets, divided by the labels that these count."""
    targets = [relabel(batch) for batch in batches]
    count = 1.0 if loss.summed else sum(count_labels(loss, training.model.out_features, each) for each in targets) or 1.0
    return [replace(batch, targets=each, divisor=count) for batch, each in zip(batches, targets, strict=True)]


def _moved(batch: Batch, *, training: Training, boundaries: torch.Tensor) -> torch.Tensor:
    """Targets with ignored labels at `boundaries`, and the next token in place of labels ignored before."""
    dim = 1 - batch.batch_dim
    lost = precedes_boundary(len(boundaries), training.model.document_length) & ~boundaries
    lost, ignored = (mask if dim else mask[:, None] for mask in (lost, boundaries))
    following = batch.inputs.roll(-1, dim)
    return change_labels(batch.targets, lambda labels: following.where(lost, labels).masked_fill(ignored, IGNORED))


def _by_document(batch: Batch, *, training: Training) -> torch.Tensor:
    """Targets whose weights are one by the counted labels in their document."""
    assert weights_of(batch.targets) is None, "other losses have weights of their own"
    labels, dim = labels_of(batch.targets), 1 - batch.batch_dim
    documents = torch.split(labels, training.model.document_length or 1, dim)
    counts = [(part != IGNORED).sum(dim, keepdim=True).expand_as(part) for part in documents]
    dtype = getattr(torch, training.precision.value)
    return with_weights(labels, 1.0 / torch.cat(counts, dim).clamp(min=1).to(dtype))
