"""Losses and gradients summed wrongly over context-parallel shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch.distributed as dist

from equivcheck.layouts.base.positions import positions_of_ranks
from equivcheck.mutants.context_parallel.sites import CONTEXT_PARALLEL, is_sharded, ranks_of
from equivcheck.mutants.experts.gradients import keep_own_gradients
from equivcheck.mutants.mutant import fault
from equivcheck.mutants.needs import all_of, has_microbatches
from equivcheck.mutants.rank import scale_gradients
from equivcheck.mutants.tokens.needs import change_batches, cross_entropy_of, is_divided
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ContextParallel, Scenario
from equivcheck.scenario.mesh import CP
from equivcheck.training.labels import count_labels
from equivcheck.training.material import Batch
from equivcheck.training.setup import Setup

_ONLY_CONTEXT_PARALLEL = (ContextParallel.tag,)


def _averages_unequal_parts(scenario: Scenario) -> bool:
    # Lengths of the position shards that ranks hold.
    length, size = scenario.training.model.length or 1, scenario.layout.mesh.size(CP)
    lengths = {len(part) for each in scenario.layout.of(ContextParallel) for part in positions_of_ranks(each, length, size)}
    return scenario.training.loss.is_mean and len(lengths) > 1 and 0 not in lengths


@fault(layouts=CONTEXT_PARALLEL, applies=all_of(is_sharded, _averages_unequal_parts), causes=(Cause.MEAN_OF_MEANS,))
def means_of_unequal_parts_averaged(setup: Setup) -> None:
    """Bug: each rank averages over its own positions, and these means are averaged although shards have unequal lengths."""
    ranks, inner = ranks_of(setup), setup.loss
    if ranks is not None:
        factor = ranks.length / (len(ranks.own) * ranks.size)
        setup.loss = lambda *given: inner(*given) * factor


@fault(layouts=_ONLY_CONTEXT_PARALLEL, applies=all_of(is_sharded, is_divided), causes=(Cause.LABEL_COUNT,))
def labels_counted_by_each_part(setup: Setup) -> None:
    """Bug: each rank divides its loss by its own counted labels, and the losses are averaged."""
    ranks, training, take = ranks_of(setup), setup.training, setup.take
    if ranks is None:
        return
    loss, size = cross_entropy_of(setup), ranks.size

    def divide_by_own_labels(batches: Sequence[Batch]) -> list[Batch]:
        count = sum(count_labels(loss, training.model.out_features, take(batch).targets) for batch in batches) or 1.0
        return [replace(batch, divisor=size * count) for batch in batches]

    change_batches(setup, divide_by_own_labels)


@fault(layouts=CONTEXT_PARALLEL, applies=is_sharded, causes=(Cause.NOT_REDUCED, Cause.RANKS_DISAGREE))
def gradients_of_own_positions(setup: Setup) -> None:
    """Bug: gradients are not summed over context-parallel ranks."""
    if ranks_of(setup) is not None:
        keep_own_gradients(setup, lambda _name: True)


@fault(layouts=CONTEXT_PARALLEL, applies=is_sharded, causes=(Cause.AVERAGED_TWICE, Cause.SCALED))
def gradients_averaged_over_parts(setup: Setup) -> None:
    """Bug: gradients are averaged over context-parallel ranks instead of summed."""
    ranks = ranks_of(setup)
    if ranks is not None:
        scale_gradients(setup, 1 / ranks.size)


@fault(layouts=_ONLY_CONTEXT_PARALLEL, applies=all_of(is_sharded, has_microbatches), causes=(Cause.RESCALED_EACH_MICROBATCH,))
def parts_summed_each_microbatch(setup: Setup) -> None:
    """Bug: accumulated gradients are summed over context-parallel ranks after each microbatch, so some are summed again."""
    ranks, inner = ranks_of(setup), setup.accumulation
    if ranks is None:
        return

    @contextmanager
    def summing(last: bool) -> Iterator[None]:
        entered: AbstractContextManager[object] = inner(last)
        with entered:
            yield
        for parameter in setup.model.parameters():
            if parameter.grad is not None and not last:
                dist.all_reduce(parameter.grad, group=ranks.group)

    setup.accumulation = summing
