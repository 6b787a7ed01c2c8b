"""Cross-entropy divided by a wrong number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import DATA_PARALLEL, EVERYWHERE, all_of, has_data_ranks, has_microbatches
from equivcheck.mutants.rank import data_ranks
from equivcheck.mutants.tokens.needs import change_batches, counts_labels, cross_entropy_of, has_loss, ignores_labels, is_divided
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.labels import count_labels, labels_of
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

Divisors = Callable[[Sequence[Batch]], Sequence[float]]
"""Function that returns the divisor of each microbatch's loss, given the microbatches of a step."""


def _divide(setup: Setup, divisors: Divisors) -> None:
    def divide_losses(batches: Sequence[Batch]) -> list[Batch]:
        return [replace(batch, divisor=divisor) for batch, divisor in zip(batches, divisors(batches), strict=True)]

    change_batches(setup, divide_losses)


def _count(setup: Setup, *targets: torch.Tensor) -> float:
    """Count labels that are not ignored. Returns at least 1, because a rank without such labels would get a NaN loss."""
    return sum(count_labels(cross_entropy_of(setup), setup.training.model.out_features, each) for each in targets) or 1.0


@fault(layouts=DATA_PARALLEL, applies=all_of(has_data_ranks, counts_labels), causes=(Cause.LABEL_COUNT,))
def labels_counted_by_each_rank(setup: Setup) -> None:
    """Bug: each rank divides its loss by its own counted labels, and gradients are averaged."""
    ranks, take = data_ranks(setup), setup.take

    def divisors(batches: Sequence[Batch]) -> list[float]:
        return [ranks * _count(setup, *(take(batch).targets for batch in batches))] * len(batches)

    _divide(setup, divisors)


@fault(layouts=EVERYWHERE, applies=all_of(has_microbatches, counts_labels), causes=(Cause.LABEL_COUNT,), minimum=ONE_RANK)
def labels_counted_by_microbatch(setup: Setup) -> None:
    """Bug: each microbatch's loss is divided by its own counted labels, and these means are averaged."""
    _divide(setup, lambda batches: [len(batches) * _count(setup, batch.targets) for batch in batches])


@fault(layouts=DATA_PARALLEL, applies=all_of(has_data_ranks, has_microbatches, counts_labels), causes=(Cause.LABEL_COUNT,))
def labels_counted_by_microbatch_of_each_rank(setup: Setup) -> None:
    """Bug: each rank divides each microbatch's loss by its own counted labels, as `reduction="mean"` does."""
    ranks, take = data_ranks(setup), setup.take
    _divide(setup, lambda batches: [ranks * len(batches) * _count(setup, take(batch).targets) for batch in batches])


@fault(
    layouts=EVERYWHERE, applies=all_of(counts_labels, ignores_labels), causes=(Cause.LABEL_COUNT, Cause.SCALED), minimum=ONE_RANK
)
def ignored_labels_counted(setup: Setup) -> None:
    """Bug: the loss is divided by the number of all labels, including ignored labels."""
    _divide(setup, lambda batches: [float(sum(labels_of(batch.targets).numel() for batch in batches))] * len(batches))


@fault(
    layouts=EVERYWHERE,
    applies=has_loss(lambda loss: not loss.summed and loss.class_weights),
    causes=(Cause.LABEL_COUNT, Cause.SCALED),
    minimum=ONE_RANK,
)
def labels_counted_without_class_weights(setup: Setup) -> None:
    """Bug: labels are weighted by class in the loss, but not in the divisor."""
    loss, outputs = replace(cross_entropy_of(setup), class_weights=False), setup.training.model.out_features

    def divisors(batches: Sequence[Batch]) -> list[float]:
        return [sum(count_labels(loss, outputs, batch.targets) for batch in batches)] * len(batches)

    _divide(setup, divisors)


@fault(layouts=EVERYWHERE, applies=is_divided, causes=(Cause.LABEL_COUNT, Cause.SCALED), minimum=ONE_RANK)
def labels_not_counted(setup: Setup) -> None:
    """Bug: the loss is summed over labels, but not divided by their number."""
    _divide(setup, lambda batches: [1.0] * len(batches))


@fault(
    layouts=DATA_PARALLEL,
    applies=all_of(has_data_ranks, is_divided),
    causes=(Cause.AVERAGED_TWICE, Cause.SCALED, Cause.LABEL_COUNT),
)
def labels_of_all_ranks_counted_and_averaged(setup: Setup) -> None:
    """Bug: the loss is divided by all ranks' labels, and gradients are averaged over ranks as well."""
    ranks = data_ranks(setup)
    _divide(setup, lambda batches: [batch.divisor * ranks for batch in batches])
