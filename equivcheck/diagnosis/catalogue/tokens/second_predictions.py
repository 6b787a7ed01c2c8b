"""Heads that predict two tokens, whose second prediction has wrong labels or a wrong count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import changing_batches, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy, Training
from equivcheck.training.documents import precedes_border
from equivcheck.training.labels import (
    change_weights,
    count_labels,
    label_weights,
    labels_of,
    labels_two_ahead,
    weigh_predictions,
    with_weights,
)
from equivcheck.training.material import Batch

Second = Callable[[torch.Tensor], torch.Tensor]
"""Computes labels of the second prediction from those of the first, (rows, length)."""


def wrong_second_predictions(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield second predictions divided by another count, or with the labels of another token."""
    training, loss = diverged.training, diverged.training.loss
    if not training.model.predicts_two or not isinstance(loss, CrossEntropy):
        return
    if not loss.summed:
        words = "the loss of the second prediction is divided by the labels of the first"
        change = changing_batches(partial(_weighed_alike, loss=loss, classes=training.model.out_features))
        yield on_one_device(Cause.LABEL_WEIGHTS, words, change)
    ways: list[tuple[str, Second]] = [("the labels of the first, for the next token", lambda labels: labels)]
    if training.model.packs_documents:
        none = precedes_border(training.model.length or 1, None)
        ways.append(("labels in the next document before each border", partial(labels_two_ahead, borders=none)))
    for what, second in ways:
        change = changing_batches(partial(_relabelled, second=second, training=training, loss=loss))
        yield on_one_device(Cause.ANOTHER_LABEL, f"the second prediction has {what}", change)


def _weighed_alike(batches: Sequence[Batch], *, loss: CrossEntropy, classes: int) -> list[Batch]:
    """Microbatches whose second labels have the weights of the first."""

    def weigh(labels: torch.Tensor) -> torch.Tensor:
        return label_weights(loss, classes, labels[..., 0]).unsqueeze(-1).expand_as(labels)

    return [replace(batch, targets=change_weights(batch.targets, batch.batch_dim, weigh)) for batch in batches]


def _relabelled(batches: Sequence[Batch], *, second: Second, training: Training, loss: CrossEntropy) -> list[Batch]:
    """Microbatches with other second labels, weighted and divided by what these count."""
    classes, dim = training.model.out_features, training.data.batch_dim
    first = [labels_of(batch.targets)[..., 0].transpose(0, dim) for batch in batches]
    labels = [torch.stack((each, second(each)), -1) for each in first]
    weights = weigh_predictions(loss, classes, labels)
    dtype = getattr(torch, training.precision.value)
    targets = [with_weights(each, weight.to(dtype)) for each, weight in zip(labels, weights, strict=True)]
    count = 1.0 if loss.summed else sum(count_labels(loss, classes, each) for each in targets) or 1.0
    return [
        replace(batch, targets=each.transpose(0, dim).contiguous(), divisor=count)
        for batch, each in zip(batches, targets, strict=True)
    ]
