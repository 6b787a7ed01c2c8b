"""Cross-entropy whose labels have wrong weights, given by their rows or by their sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import DATA_PARALLEL, EVERYWHERE, all_of, has_data_ranks
from equivcheck.mutants.rank import data_ranks
from equivcheck.mutants.tokens.needs import (
    change_batches,
    cross_entropy_of,
    has_loss,
    ignores_labels,
    ignores_single_labels,
    is_divided,
    length_of,
)
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy, Normaliser, Scenario
from equivcheck.training.labels import change_weights, count_labels, label_weights, labels_of, weights_of, with_weights
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

has_row_weights = has_loss(lambda loss: loss.row_weights)
"""Returns whether nothing is compiled or traced, and the loss has row weights."""


def _averages_sequences(scenario: Scenario) -> bool:
    """Whether the loss is a mean over sequences of several labels, and some labels are ignored."""
    averages = has_loss(lambda loss: loss.per is Normaliser.SEQUENCE and not loss.summed)(scenario)
    return averages and ignores_labels(scenario) and length_of(scenario) > 1


def _counts_differ_by_row(scenario: Scenario) -> bool:
    """Whether rows may have different numbers of counted labels, or different sums of class weights."""
    weighs_classes = has_loss(lambda loss: loss.class_weights)(scenario)
    return scenario.training.data.batch > 1 and (weighs_classes or ignores_single_labels(scenario))


def weigh_again(setup: Setup, weights: Callable[[CrossEntropy, int, torch.Tensor], torch.Tensor], *, count: bool = False) -> None:
    """Replace the labels' weights by the result of `weights(loss, num_classes, labels)`. Rows are dim 0 of these labels.

    With `count`, the divisor of the loss becomes the sum of the new weights.
    """
    loss, classes = cross_entropy_of(setup), setup.training.model.out_features

    def change(batches: list[Batch]) -> list[Batch]:
        targets = [
            change_weights(each.targets, each.batch_dim, lambda labels: weights(loss, classes, labels)) for each in batches
        ]
        total = sum(count_labels(loss, classes, each) for each in targets) or 1.0
        return [
            replace(batch, targets=each, divisor=total if count else batch.divisor)
            for batch, each in zip(batches, targets, strict=True)
        ]

    change_batches(setup, lambda batches: change(list(batches)))


@fault(
    layouts=EVERYWHERE,
    applies=all_of(_averages_sequences, _counts_differ_by_row),
    causes=(Cause.LABEL_WEIGHTS,),
    minimum=ONE_RANK,
)
def tokens_averaged_instead_of_sequences(setup: Setup) -> None:
    """Bug: the loss is the mean over all counted labels, not over sequences."""
    weigh_again(setup, _per_token, count=True)


def _per_token(loss: CrossEntropy, classes: int, labels: torch.Tensor) -> torch.Tensor:
    return label_weights(replace(loss, per=Normaliser.TOKEN), classes, labels)


@fault(layouts=EVERYWHERE, applies=_averages_sequences, causes=(Cause.LABEL_WEIGHTS,), minimum=ONE_RANK)
def sequences_averaged_over_ignored_labels(setup: Setup) -> None:
    """Bug: each sequence's sum is divided by its length, not by its counted labels."""
    weigh_again(setup, lambda loss, classes, labels: label_weights(loss, classes, labels.clamp(min=0)))


@fault(layouts=EVERYWHERE, applies=has_row_weights, causes=(Cause.LABEL_WEIGHTS, Cause.SCALED), minimum=ONE_RANK)
def row_weights_lost(setup: Setup) -> None:
    """Bug: rows are not weighted, but the divisor is the sum of their weights."""
    weigh_again(setup, _without_rows)


def _without_rows(loss: CrossEntropy, classes: int, labels: torch.Tensor) -> torch.Tensor:
    return label_weights(replace(loss, row_weights=False), classes, labels)


@fault(
    layouts=EVERYWHERE,
    applies=all_of(has_row_weights, is_divided),
    causes=(Cause.LABEL_COUNT, Cause.SCALED),
    minimum=ONE_RANK,
)
def row_weights_not_counted(setup: Setup) -> None:
    """Bug: rows are weighted in the loss, but not in the divisor."""
    loss, classes = cross_entropy_of(setup), setup.training.model.out_features

    def change(batches: list[Batch]) -> list[Batch]:
        plain = [
            change_weights(each.targets, each.batch_dim, lambda labels: _without_rows(loss, classes, labels)) for each in batches
        ]
        return [replace(batch, divisor=sum(count_labels(loss, classes, each) for each in plain) or 1.0) for batch in batches]

    change_batches(setup, lambda batches: change(list(batches)))


@fault(layouts=DATA_PARALLEL, applies=all_of(has_data_ranks, has_row_weights), causes=(Cause.LABEL_WEIGHTS,))
def row_weights_of_first_rank(setup: Setup) -> None:
    """Bug: each rank weights its rows like the first rank's."""
    ranks = data_ranks(setup)

    def of_first(targets: torch.Tensor, dim: int) -> torch.Tensor:
        weights = weights_of(targets)
        assert weights is not None, "rows are weighted"
        return with_weights(labels_of(targets), torch.cat([weights.chunk(ranks, dim)[0]] * ranks, dim))

    change_batches(setup, lambda batches: [replace(batch, targets=of_first(batch.targets, batch.batch_dim)) for batch in batches])
