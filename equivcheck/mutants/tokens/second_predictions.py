"""Heads that predict two tokens, whose second prediction has wrong labels or a wrong count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of
from equivcheck.mutants.tokens.documents import packs_documents
from equivcheck.mutants.tokens.needs import change_batches, cross_entropy_of, has_loss, is_divided, length_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.training.documents import precedes_border
from equivcheck.training.labels import (
    count_labels,
    label_weights,
    labels_of,
    labels_two_ahead,
    weigh_predictions,
    with_weights,
)
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

Change = Callable[[torch.Tensor], torch.Tensor]
"""Computes labels of the second prediction from those of the first, (rows, length)."""


def predicts_two(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and each position has two predictions."""
    return has_loss()(scenario) and scenario.training.model.predicts_two and length_of(scenario) > 1


def _relabel(setup: Setup, second: Change, *, weigh_alike: bool = False) -> None:
    """Replace the labels of the second prediction. With `weigh_alike`, they weigh as much as those of the first."""
    loss, classes = cross_entropy_of(setup), setup.training.model.out_features
    batch_dim, dtype = setup.training.data.batch_dim, getattr(torch, setup.training.precision.value)

    def change(batches: Sequence[Batch]) -> list[Batch]:
        first = [labels_of(batch.targets)[..., 0].transpose(0, batch_dim) for batch in batches]
        labels = [torch.stack((each, second(each)), -1) for each in first]
        weights = weigh_predictions(loss, classes, labels)
        if weigh_alike:
            weights = [label_weights(loss, classes, each).unsqueeze(-1).expand(*each.shape, 2) for each in first]
        targets = [with_weights(each, weight.to(dtype)) for each, weight in zip(labels, weights, strict=True)]
        count = 1.0 if loss.summed else sum(count_labels(loss, classes, each) for each in targets) or 1.0
        if weigh_alike:
            count = batches[0].divisor
        targets = [each.transpose(0, batch_dim).contiguous() for each in targets]
        return [replace(batch, targets=each, divisor=count) for batch, each in zip(batches, targets, strict=True)]

    change_batches(setup, change)


def _borders(setup: Setup) -> torch.Tensor:
    return precedes_border(setup.training.model.length or 1, setup.training.model.document_length)


@fault(layouts=EVERYWHERE, applies=all_of(predicts_two, is_divided), causes=(Cause.LABEL_WEIGHTS,), minimum=ONE_RANK)
def second_prediction_counted_as_first(setup: Setup) -> None:
    """Bug: the loss of the second prediction is divided by the labels of the first, although it has fewer."""
    borders = _borders(setup)
    _relabel(setup, lambda labels: labels_two_ahead(labels, borders), weigh_alike=True)


@fault(layouts=EVERYWHERE, applies=predicts_two, causes=(Cause.ANOTHER_LABEL,), minimum=ONE_RANK)
def second_prediction_of_next_token(setup: Setup) -> None:
    """Bug: the second prediction has the labels of the first: those for the next token, not for the one after it."""
    _relabel(setup, lambda labels: labels)


@fault(layouts=EVERYWHERE, applies=all_of(predicts_two, packs_documents), causes=(Cause.ANOTHER_LABEL,), minimum=ONE_RANK)
def second_prediction_crosses_documents(setup: Setup) -> None:
    """Bug: the second prediction before each border has a label in the next document."""
    _relabel(setup, lambda labels: labels_two_ahead(labels, torch.zeros(labels.shape[1], dtype=torch.bool)))
