"""Mistakes in the weights with which a cross-entropy counts labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import changing_batches, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy, Normaliser
from equivcheck.training.labels import change_weights, count_labels, label_weights, labels_of, weights_of, with_weights
from equivcheck.training.material import Batch

Weigh = Callable[[torch.Tensor], torch.Tensor]
"""Function to compute label weights from labels with rows along dim 0."""


def wrong_label_weights(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes with label weights: averages over all tokens or positions, no row weights, or the first rank's row weights.

    Some mistakes have a second variant, in which the loss is also divided by the sum of the wrong weights.
    """
    loss = diverged.training.loss
    if not isinstance(loss, CrossEntropy) or not loss.weighs_labels:
        return
    classes = diverged.training.model.out_features
    ways: list[tuple[str, Weigh]] = []
    if loss.per is Normaliser.SEQUENCE:
        by_token = replace(loss, per=Normaliser.TOKEN)
        ways.append(("labels are averaged over all tokens, not per sequence", partial(label_weights, by_token, classes)))
        over_positions = partial(_over_positions, loss, classes)
        ways.append(("each sequence is divided by its length, not by its counted labels", over_positions))
    if loss.row_weights:
        ways.append(("rows are not weighted", partial(label_weights, replace(loss, row_weights=False), classes)))
    for words, weigh in ways:
        for counts in (False, True):
            change = changing_batches(partial(_weighed, weigh=weigh, loss=loss, classes=classes, counts=counts))
            yield on_one_device(Cause.LABEL_WEIGHTS, words, change)
    if loss.row_weights and not loss.summed:
        change = changing_batches(partial(_divided, weigh=ways[-1][1], loss=loss, classes=classes))
        yield on_one_device(Cause.LABEL_COUNT, "the loss is divided by the labels without the weights of their rows", change)
    if loss.row_weights and diverged.data_axes:
        ranks, where = diverged.mesh.size(*diverged.data_axes), diverged.ranks_text(diverged.data_axes)
        change = changing_batches(partial(_like_first, ranks=ranks))
        yield on_one_device(Cause.LABEL_WEIGHTS, f"each of {where} weights its rows like those of the first", change)


def _over_positions(loss: CrossEntropy, classes: int, labels: torch.Tensor) -> torch.Tensor:
    return label_weights(loss, classes, labels.clamp(min=0))


def _weighed(batches: Sequence[Batch], *, weigh: Weigh, loss: CrossEntropy, classes: int, counts: bool) -> list[Batch]:
    targets = [change_weights(batch.targets, batch.batch_dim, weigh) for batch in batches]
    total = sum(count_labels(loss, classes, each) for each in targets) or 1.0
    return [
        replace(batch, targets=each, divisor=total if counts and not loss.summed else batch.divisor)
        for batch, each in zip(batches, targets, strict=True)
    ]


def _divided(batches: Sequence[Batch], *, weigh: Weigh, loss: CrossEntropy, classes: int) -> list[Batch]:
    divisor = _weighed(batches, weigh=weigh, loss=loss, classes=classes, counts=True)[0].divisor
    return [replace(batch, divisor=divisor) for batch in batches]


def _like_first(batches: Sequence[Batch], *, ranks: int) -> list[Batch]:
    found = []
    for batch in batches:
        weights = weights_of(batch.targets)
        assert weights is not None, "rows are weighted"
        repeated = torch.cat([weights.chunk(ranks, batch.batch_dim)[0]] * ranks, batch.batch_dim)
        found.append(replace(batch, targets=with_weights(labels_of(batch.targets), repeated)))
    return found
