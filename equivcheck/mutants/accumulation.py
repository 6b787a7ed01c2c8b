"""Accumulation over microbatches and normalisation of the loss, wrong on purpose."""

from __future__ import annotations

from equivcheck.mutants import microbatches
from equivcheck.mutants.data_parallel import DATA_PARALLEL
from equivcheck.mutants.microbatches import Weighted
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import has_data_ranks, has_microbatches
from equivcheck.scenario import FSDP1, Scenario
from equivcheck.verdict.cause import Cause

ACCUMULATES = ("ddp", "replicate", "fsdp1", "fsdp2", "spmd", "fsdp2 x tensor_parallel")
"""Layouts in which a rank accumulates over microbatches by itself: not a pipeline, whose schedule does."""


def _averages(scenario: Scenario) -> bool:
    return has_microbatches(scenario) and scenario.training.loss.is_mean


def _is_uneven(scenario: Scenario) -> bool:
    return _averages(scenario) and len(set(scenario.training.data.microbatches)) > 1


def _sums_over_ranks(scenario: Scenario) -> bool:
    return has_data_ranks(scenario) and not scenario.training.loss.is_mean


def _loses_some_rows(scenario: Scenario) -> bool:
    return has_microbatches(scenario) and has_data_ranks(scenario)


def _waits_for_last(scenario: Scenario) -> bool:
    # FullyShardedDataParallel keeps gradients unsharded meanwhile, and raises where it finds such at the update.
    waits = any(getattr(parallelism, "no_sync", False) for parallelism in scenario.layout.parallelisms)
    sharded = any(isinstance(parallelism, FSDP1) for layout in scenario.layouts for parallelism in layout.parallelisms)
    return _loses_some_rows(scenario) and waits and not sharded


TWO_MICROBATCHES = "it takes two microbatches, and neither a second rank nor a second step"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="microbatches_summed",
        wrong="The means of microbatches are summed and not divided by their number.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=_averages,
        plant=Weighted(microbatches.summed),
        causes=(Cause.MICROBATCHES_SUMMED, Cause.SCALED),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
    Mutant(
        name="microbatches_averaged_twice",
        wrong="Gradients are divided by the number of microbatches once more.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=has_microbatches,
        plant=Weighted(microbatches.divided_again),
        causes=(Cause.SCALED, Cause.AVERAGED_TWICE),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
    Mutant(
        name="rescaled_each_microbatch",
        wrong="What has been accumulated is divided by the number of microbatches again at each one.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=has_microbatches,
        plant=Weighted(microbatches.divided_by_later),
        causes=(Cause.RESCALED_EACH_MICROBATCH,),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
    Mutant(
        name="only_last_microbatch",
        wrong="Gradients are zeroed before each microbatch, so that only the last one's are kept.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=has_microbatches,
        plant=Weighted(microbatches.last_only),
        causes=(Cause.MICROBATCH_LOST,),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
    Mutant(
        name="only_first_microbatch",
        wrong="Gradients of the first microbatch are kept, and those of the others are not added.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=has_microbatches,
        plant=Weighted(microbatches.first_only),
        causes=(Cause.MICROBATCH_LOST,),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
    Mutant(
        name="last_microbatch_lost",
        wrong="The last microbatch counts in the loss, but its gradients are not added.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=has_microbatches,
        plant=Weighted(microbatches.but_last),
        causes=(Cause.MICROBATCH_LOST,),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
    Mutant(
        name="last_microbatch_lost_on_one_rank",
        wrong="The last rank leaves out the gradients of its last microbatch.",
        family=Family.ACCUMULATION,
        layouts=DATA_PARALLEL,
        applies=_loses_some_rows,
        plant=Weighted(microbatches.but_last_on_last_rank),
        causes=(Cause.ROWS_LOST, Cause.MICROBATCH_LOST),
        minimum=Minimum(because="one rank that does it right and one that does not, and two microbatches"),
    ),
    Mutant(
        name="same_microbatch",
        wrong="The first microbatch is computed on again and again, as if the loader never moved on.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=has_microbatches,
        plant=microbatches.repeat_first,
        causes=(Cause.MICROBATCH_LOST, Cause.ROWS_LOST),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
    Mutant(
        name="mean_of_means",
        wrong="Means of microbatches are averaged as if these were equally large, rather than over the rows of the batch.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=_is_uneven,
        plant=Weighted(microbatches.equal),
        causes=(Cause.MEAN_OF_MEANS,),
        minimum=Minimum(
            ranks=1, because="it takes two microbatches of different sizes, and neither a second rank nor a second step"
        ),
    ),
    Mutant(
        name="sum_averaged_over_ranks",
        wrong="A summed loss is not multiplied by the number of ranks, although their gradients are averaged.",
        family=Family.ACCUMULATION,
        layouts=("ddp", "replicate", "fsdp1", "fsdp2"),
        applies=_sums_over_ranks,
        plant=microbatches.average_sum,
        causes=(Cause.AVERAGED_TWICE, Cause.SCALED),
        minimum=Minimum(because="one rank divides by one; two halve the first loss and gradient"),
    ),
    Mutant(
        name="reduced_after_first_microbatch",
        wrong="Gradients are reduced after the first microbatch, and what later ones add stays as it is on each rank.",
        family=Family.ACCUMULATION,
        layouts=("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp2 x tensor_parallel"),
        applies=_waits_for_last,
        plant=microbatches.reduce_after_first,
        # Where parameters are sharded, what has not been reduced has not come to any shard.
        causes=(Cause.NOT_REDUCED, Cause.MICROBATCH_LOST),
        minimum=Minimum(because="two ranks differ in what the second of two microbatches adds"),
    ),
    Mutant(
        name="stepped_each_microbatch",
        wrong="The optimizer steps at each microbatch, and gradients are zeroed after it.",
        family=Family.ACCUMULATION,
        layouts=ACCUMULATES,
        applies=has_microbatches,
        plant=microbatches.step_at_each,
        causes=(Cause.STEPPED_EACH_MICROBATCH, Cause.MICROBATCH_LOST),
        minimum=Minimum(ranks=1, because=TWO_MICROBATCHES),
    ),
)
"""Every mutant of the family."""
