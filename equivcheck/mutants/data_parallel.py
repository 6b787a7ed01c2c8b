"""Data parallelism, wrong on purpose."""

from __future__ import annotations

from equivcheck.mutants import gradients, rows, wrappers
from equivcheck.mutants.gradients import Scaled
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import has_data_ranks, has_steps, is_eager, reduces_by_hooks
from equivcheck.mutants.places import both, updates_tell
from equivcheck.mutants.rows import SharesOf
from equivcheck.scenario import DDP, Scenario, Side
from equivcheck.scenario.mesh import TP
from equivcheck.verdict.cause import Cause

WRAPPED = ("ddp", "replicate", "ddp x tensor_parallel", "replicate x tensor_parallel")
"""Layouts in which a `DistributedDataParallel` may reduce gradients."""
ALONE = ("ddp",)
"""The layout of the wrapper and nothing else."""
OVER_OTHERS = ("ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp1 x tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts in which some ranks compute on the same rows."""
DATA_PARALLEL = ("ddp", "replicate", "fsdp1", "fsdp2", *OVER_OTHERS)
"""Layouts in which ranks average gradients."""
TAKES_ROWS = (*DATA_PARALLEL, "spmd")
"""Layouts in which ranks take their share of the rows."""


def _has_offset(scenario: Scenario) -> bool:
    return has_data_ranks(scenario) and scenario.training.model.offset


def _looks_for_unused(scenario: Scenario) -> bool:
    looks = any((parallelism.find_unused_parameters or parallelism.static_graph) for parallelism in scenario.layout.of(DDP))
    sides = [layer.side for layer in scenario.training.model.layers if not layer.frozen]
    has_unused = Side.NEVER in sides or (Side.EVEN_STEPS in sides and scenario.training.steps > 1)
    return reduces_by_hooks(scenario) and looks and has_unused


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="reduction_missing",
        wrong="The all-reduce of gradients never runs: each rank updates by its own.",
        family=Family.DATA_PARALLEL,
        layouts=WRAPPED,
        applies=reduces_by_hooks,
        plant=wrappers.reduce_nothing,
        causes=(Cause.NOT_REDUCED,),
        minimum=Minimum(because="one rank has nobody to average with; two disagree in the first gradient of any weight"),
    ),
    Mutant(
        name="gradients_summed",
        wrong="Gradients are summed over ranks and never divided by their number.",
        family=Family.DATA_PARALLEL,
        layouts=WRAPPED,
        applies=reduces_by_hooks,
        plant=wrappers.sum_up,
        causes=(Cause.SUMMED, Cause.SCALED),
        minimum=Minimum(because="the sum over one rank is the mean; that over two is twice the first gradient"),
    ),
    Mutant(
        name="averaged_twice",
        wrong="Gradients that have been averaged are divided by the number of data-parallel ranks once more.",
        family=Family.DATA_PARALLEL,
        layouts=DATA_PARALLEL,
        applies=has_data_ranks,
        plant=Scaled(gradients.over_data_size),
        causes=(Cause.AVERAGED_TWICE, Cause.SCALED),
        minimum=Minimum(because="one rank divides by one; two halve the first gradient"),
    ),
    Mutant(
        name="averaged_over_all_ranks",
        wrong="Gradients are divided by the number of all ranks, among them those that split the model and not the batch.",
        family=Family.DATA_PARALLEL,
        layouts=OVER_OTHERS,
        applies=lambda scenario: is_eager(scenario) and scenario.layout.mesh.size(TP) > 1,
        plant=Scaled(gradients.over_other_size),
        causes=(Cause.AVERAGED_TWICE, Cause.SCALED),
        minimum=Minimum(
            because="two ranks must split the model; one along the batch is enough, as the factor is that of the others"
        ),
    ),
    Mutant(
        name="reduced_over_other_axis",
        wrong="Gradients are averaged over the ranks that split the model rather than over those that split the batch.",
        family=Family.DATA_PARALLEL,
        layouts=("ddp x tensor_parallel", "replicate x tensor_parallel"),
        applies=reduces_by_hooks,
        plant=wrappers.reduce_over_other_axis,
        # Where the shards of ranks are not of one size, their buckets are not either, and the ranks wait for each other.
        causes=(Cause.REDUCED_OVER_PART, Cause.NOT_REDUCED, Cause.CALLS_DIFFER),
        minimum=Minimum(because="two ranks that split the batch do not average; along the other axis one is enough"),
    ),
    Mutant(
        name="parameter_left_out",
        wrong="One parameter's gradient is left out of the reduction.",
        family=Family.DATA_PARALLEL,
        layouts=WRAPPED,
        applies=reduces_by_hooks,
        plant=gradients.keep_one_out,
        causes=(Cause.NOT_REDUCED,),
        minimum=Minimum(because="two ranks have different rows; the parameter left out may be the only one"),
    ),
    Mutant(
        name="last_bucket_kept",
        wrong="The last bucket of gradients is never reduced.",
        family=Family.DATA_PARALLEL,
        layouts=WRAPPED,
        applies=reduces_by_hooks,
        plant=wrappers.keep_last_bucket,
        causes=(Cause.NOT_REDUCED,),
        minimum=Minimum(because="the only bucket is the last one; two ranks have different rows"),
    ),
    Mutant(
        name="last_bucket_lost",
        wrong="The last bucket of gradients comes back empty.",
        family=Family.DATA_PARALLEL,
        layouts=WRAPPED,
        applies=reduces_by_hooks,
        plant=wrappers.lose_last_bucket,
        causes=(Cause.GRADIENT_LOST,),
        minimum=Minimum(because="the only bucket is the last one"),
    ),
    Mutant(
        name="same_rows_everywhere",
        wrong="Every rank reads the first rank's rows of the batch.",
        family=Family.DATA_PARALLEL,
        layouts=TAKES_ROWS,
        applies=has_data_ranks,
        plant=SharesOf(rows.first),
        causes=(Cause.SAME_ROWS, Cause.ROWS_LOST),
        minimum=Minimum(because="the rows of one rank are all; of two ranks, half the rows are read by nobody"),
    ),
    Mutant(
        name="last_rows_lost",
        wrong="The last rank reads the rows of the one before, and nobody its own.",
        family=Family.DATA_PARALLEL,
        layouts=TAKES_ROWS,
        applies=has_data_ranks,
        plant=SharesOf(rows.but_the_last),
        causes=(Cause.ROWS_LOST, Cause.SAME_ROWS),
        minimum=Minimum(because="there must be a rank before the last"),
    ),
    Mutant(
        name="shuffled_apart",
        wrong="Each rank takes its share of another permutation of the rows: some rows are read twice, others by nobody.",
        family=Family.DATA_PARALLEL,
        layouts=TAKES_ROWS,
        applies=has_data_ranks,
        plant=rows.shuffle_apart,
        causes=(Cause.ROWS_LOST, Cause.SAME_ROWS),
        minimum=Minimum(because="one rank takes all rows in any order; two with a row each take the same one"),
    ),
    Mutant(
        name="rank_left_out",
        wrong="The last rank's rows count in the loss, but its gradients are zero.",
        family=Family.DATA_PARALLEL,
        layouts=DATA_PARALLEL,
        applies=has_data_ranks,
        plant=gradients.leave_last_rank_out,
        causes=(Cause.ROWS_LOST,),
        minimum=Minimum(because="two ranks: one that counts and one that does not"),
    ),
    Mutant(
        name="weights_not_broadcast",
        wrong="Ranks other than the first start from weights of their own.",
        family=Family.DATA_PARALLEL,
        layouts=DATA_PARALLEL,
        applies=has_data_ranks,
        plant=gradients.start_apart,
        causes=(Cause.UNEQUAL_START, Cause.RANKS_DISAGREE),
        minimum=Minimum(because="the first rank is right; the second is not, from the first loss on"),
    ),
    Mutant(
        name="buffers_not_broadcast",
        wrong="Ranks other than the first have a buffer of their own, which is never sent to them.",
        family=Family.DATA_PARALLEL,
        layouts=DATA_PARALLEL,
        applies=_has_offset,
        plant=wrappers.keep_buffers_apart,
        causes=(Cause.UNEQUAL_START, Cause.RANKS_DISAGREE),
        minimum=Minimum(because="the first rank is right; the second's buffer is added to the outputs of any model"),
    ),
    Mutant(
        name="gradients_not_zeroed",
        wrong="Gradients are not zeroed between steps, so each update sees the sum of all before.",
        family=Family.DATA_PARALLEL,
        layouts=DATA_PARALLEL,
        applies=has_steps,
        plant=gradients.never_zero,
        causes=(Cause.NOT_ZEROED,),
        minimum=Minimum(ranks=1, steps=2, because="the first step finds no gradients; ranks have nothing to do with it"),
    ),
    Mutant(
        name="gradients_of_last_step",
        wrong="Each update uses the gradients of the step before, as if their reduction came a step late.",
        family=Family.DATA_PARALLEL,
        layouts=DATA_PARALLEL,
        applies=has_steps,
        plant=gradients.keep_from_last_step,
        causes=(Cause.STALE,),
        minimum=Minimum(ranks=1, steps=2, because="the first step has no step before; ranks have nothing to do with it"),
    ),
    Mutant(
        name="zeroed_before_update",
        wrong="Gradients are right, but zeroed between clipping and the update.",
        family=Family.DATA_PARALLEL,
        layouts=DATA_PARALLEL,
        applies=both(is_eager, updates_tell),
        plant=gradients.zero_before_update,
        causes=(Cause.GRADIENT_LOST, Cause.NOT_UPDATED),
        minimum=Minimum(ranks=1, because="the first update shows it, and it alone: gradients are right"),
    ),
    Mutant(
        name="forward_without_sync",
        wrong="Forward runs under no_sync and backward outside, where it is expected to reduce.",
        family=Family.DATA_PARALLEL,
        layouts=("ddp", "ddp x tensor_parallel"),
        applies=reduces_by_hooks,
        plant=wrappers.forward_without_sync,
        causes=(Cause.NOT_REDUCED,),
        minimum=Minimum(because="one rank has nobody to average with; two disagree in the first gradient"),
    ),
    Mutant(
        name="inner_module_called",
        wrong="The module inside the wrapper is called, so that the wrapper's hooks never run.",
        family=Family.DATA_PARALLEL,
        layouts=ALONE,
        applies=reduces_by_hooks,
        plant=wrappers.call_inner_module,
        causes=(Cause.NOT_REDUCED,),
        minimum=Minimum(because="one rank has nobody to average with; two disagree in the first gradient"),
    ),
    Mutant(
        name="unused_not_looked_for",
        wrong="A layer takes no part in a step and nobody looks for unused parameters: its bucket never goes.",
        family=Family.DATA_PARALLEL,
        layouts=ALONE,
        applies=_looks_for_unused,
        plant=wrappers.look_for_nothing_unused,
        # A step later the wrapper raises.
        causes=(Cause.NOT_REDUCED, Cause.RANK_FAILED),
        minimum=Minimum(
            because="one layer can have a side that never runs, in one bucket with all others; two ranks then disagree"
        ),
    ),
)
"""Every mutant of the family."""
