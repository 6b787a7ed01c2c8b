"""Sharded parameters and optimizer state, wrong on purpose."""

from __future__ import annotations

from equivcheck.layers.parameters import parameters_of
from equivcheck.mutants import gradients, local_updates, sharded
from equivcheck.mutants.gradients import Scaled
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import has_data_ranks, has_steps, is_eager
from equivcheck.mutants.places import both, updates_tell
from equivcheck.parallelisms.tensor_parallel.plans import splits_weights
from equivcheck.scenario import DDP, FSDP2, SGD, SPMD, Adafactor, Distribution, Muon, Scenario, TensorParallel
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP
from equivcheck.verdict.cause import Cause

FULLY_SHARDED = ("fsdp2", "fsdp2 x tensor_parallel")
"""Layouts of `fully_shard`."""
SHARDED = ("fsdp2", "fsdp1", "fsdp2 x tensor_parallel", "fsdp1 x tensor_parallel")
"""Layouts that shard parameters along the batch."""
OPTIMIZES = ("fsdp2", "fsdp1", "ddp", "replicate", "fsdp2 x tensor_parallel")
"""Layouts in which an optimizer may be handled wrongly."""


def _num_shards(scenario: Scenario) -> int:
    return scenario.layout.mesh.size(DP, SHARD)


def _is_sharded(scenario: Scenario) -> bool:
    return is_eager(scenario) and _num_shards(scenario) > 1


def _replicates_shards(scenario: Scenario) -> bool:
    return is_eager(scenario) and scenario.layout.mesh.size(REPLICATE) > 1


def _shards_replicas(scenario: Scenario) -> bool:
    return REPLICATE in scenario.layout.mesh.names and _is_sharded(scenario)


def _has_tail(scenario: Scenario) -> bool:
    """Whether some rank has fewer rows than others of a parameter that is trained, and any at all."""
    model, count = scenario.training.model, _num_shards(scenario)
    sizes = [parameter.shape[0] for parameter in parameters_of(model) if parameter.trained]
    return _is_sharded(scenario) and any(size % -(-size // count) for size in sizes)


def _keeps_state(scenario: Scenario) -> bool:
    optimizer = scenario.training.optimizer
    return has_steps(scenario) and not (isinstance(optimizer, SGD) and optimizer.momentum == 0.0)


def _passes_state(scenario: Scenario) -> bool:
    return _keeps_state(scenario) and _is_sharded(scenario)


def _needs_whole(scenario: Scenario) -> bool:
    """Whether an optimizer needs whole matrices, some have several rows, and what it makes of shards is no rounding.

    With each further step, Muon's iteration in bfloat16 makes more of directions that a gradient hardly has: rounding then moves
    an update by about as much as it is. Adafactor takes no more than means over rows and columns.
    """
    optimizer, layers = scenario.training.optimizer, scenario.training.model.layers
    has_rows = any(layer.width > 1 and layer.shares is None and not layer.frozen for layer in layers)
    tells = isinstance(optimizer, Adafactor) or (isinstance(optimizer, Muon) and optimizer.ns_steps == 1)
    return _cuts_weights(scenario) and tells and has_rows


def _cuts_weights(scenario: Scenario) -> bool:
    """Whether ranks hold different parts of some weight, as DTensors."""
    return any(
        (isinstance(parallelism, SPMD) and parallelism.distribution is Distribution.FULLY_SHARD)
        or (isinstance(parallelism, FSDP2) and _num_shards(scenario) > 1)
        or (isinstance(parallelism, TensorParallel) and scenario.layout.mesh.size(TP) > 1 and splits_weights(parallelism.plan))
        for parallelism in scenario.layout.parallelisms
    )


def _starts_here(scenario: Scenario) -> bool:
    # A checkpoint of an optimizer of other parameters cannot be saved.
    return is_eager(scenario) and scenario.start is None


def _shares_updates(scenario: Scenario) -> bool:
    shares = any(parallelism.zero_redundancy for parallelism in scenario.layout.of(DDP))
    return has_data_ranks(scenario) and shares


OF_SHARDS = "one rank holds all; of two, each holds part of one weight"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="reduce_scatter_sums",
        wrong="Reduce-scatter sums gradients, and nothing divides them by the number of ranks.",
        family=Family.SHARDING,
        layouts=FULLY_SHARDED,
        applies=has_data_ranks,
        plant=sharded.sum_up,
        causes=(Cause.SUMMED, Cause.SCALED),
        minimum=Minimum(because="the sum over one rank is the mean; that over two is twice the first gradient"),
    ),
    Mutant(
        name="flat_gradients_summed",
        wrong="Flat gradients are summed over ranks and not divided by their number.",
        family=Family.SHARDING,
        layouts=("fsdp1", "fsdp1 x tensor_parallel"),
        applies=has_data_ranks,
        plant=Scaled(gradients.data_size),
        causes=(Cause.SUMMED, Cause.SCALED),
        minimum=Minimum(because="the sum over one rank is the mean; that over two is twice the first gradient"),
    ),
    Mutant(
        name="reduce_scatter_missing",
        wrong="Each rank takes its chunk of its own gradients: nothing is reduced along the shards.",
        family=Family.SHARDING,
        layouts=FULLY_SHARDED,
        applies=_is_sharded,
        plant=sharded.reduce_nothing,
        causes=(Cause.NOT_REDUCED, Cause.REDUCED_OVER_PART),
        minimum=Minimum(because=OF_SHARDS),
    ),
    Mutant(
        name="reduce_scatter_shifted",
        wrong="Each rank takes the next one's chunk of the reduced gradients.",
        family=Family.SHARDING,
        layouts=FULLY_SHARDED,
        applies=_is_sharded,
        plant=sharded.shift_chunks,
        causes=(Cause.STATE_OF_ANOTHER, Cause.PERMUTED),
        minimum=Minimum(because=OF_SHARDS),
    ),
    Mutant(
        name="replicas_not_reduced",
        wrong="Gradients are reduced over shards, and replicas of a shard never average theirs.",
        family=Family.SHARDING,
        layouts=("fsdp2",),
        applies=_replicates_shards,
        plant=sharded.leave_replicas_apart,
        causes=(Cause.REDUCED_OVER_PART, Cause.NOT_REDUCED),
        minimum=Minimum(because="two replicas of all parameters have different rows, even if each is one shard"),
    ),
    Mutant(
        name="divided_by_shards_only",
        wrong="Gradients are summed over shards and replicas, and divided by the number of shards only.",
        family=Family.SHARDING,
        layouts=("fsdp2",),
        applies=_replicates_shards,
        plant=Scaled(gradients.replicas),
        causes=(Cause.SUMMED, Cause.SCALED),
        minimum=Minimum(because="two replicas, even if each is one shard"),
    ),
    Mutant(
        name="flat_divided_by_shards_only",
        wrong="Gradients of flat parameters are summed over shards and replicas, and divided by the number of shards only.",
        family=Family.SHARDING,
        layouts=("fsdp1",),
        applies=both(_replicates_shards, _is_sharded),
        plant=Scaled(gradients.replicas),
        causes=(Cause.SUMMED, Cause.SCALED),
        minimum=Minimum(ranks=4, because="two replicas of two shards: of one shard each, they are on file"),
    ),
    Mutant(
        name="divided_by_replicas_only",
        wrong="Gradients are summed over shards and replicas, and divided by the number of replicas only.",
        family=Family.SHARDING,
        layouts=("fsdp2", "fsdp1"),
        applies=_shards_replicas,
        plant=Scaled(gradients.shards),
        causes=(Cause.SUMMED, Cause.SCALED),
        minimum=Minimum(because="two shards, even if there is one replica"),
    ),
    Mutant(
        name="padded_tail_not_updated",
        wrong="Rows of a shard that is padded at its end are never updated.",
        family=Family.SHARDING,
        layouts=FULLY_SHARDED,
        applies=both(_has_tail, updates_tell),
        plant=sharded.keep_tail,
        causes=(Cause.NOT_UPDATED,),
        minimum=Minimum(because="three rows on two ranks: the second has one and a padded one; the first update passes it by"),
    ),
    Mutant(
        name="optimizer_of_unwrapped_parameters",
        wrong="The optimizer holds the parameters from before wrapping: those that compute are never updated.",
        family=Family.SHARDING,
        layouts=OPTIMIZES,
        applies=both(_starts_here, updates_tell),
        plant=sharded.optimize_others,
        causes=(Cause.NOT_UPDATED,),
        minimum=Minimum(ranks=1, because="the first update shows it, whoever else there is"),
    ),
    Mutant(
        name="state_lost",
        wrong="The optimizer's state is lost before each step.",
        family=Family.SHARDING,
        layouts=OPTIMIZES,
        applies=both(_keeps_state, updates_tell),
        plant=sharded.lose_state,
        causes=(Cause.STATE_LOST,),
        minimum=Minimum(ranks=1, steps=2, because="the first step has no state to lose; ranks have nothing to do with it"),
    ),
    Mutant(
        name="state_of_another_rank",
        wrong="Each rank goes on with the next one's shard of the optimizer's state, as after a resumption that mixes up ranks.",
        family=Family.SHARDING,
        layouts=FULLY_SHARDED,
        applies=both(_passes_state, updates_tell),
        plant=sharded.pass_state_on,
        causes=(Cause.STATE_OF_ANOTHER, Cause.PERMUTED),
        minimum=Minimum(steps=2, because="two shards have states that differ, and there is none before the first step"),
    ),
    Mutant(
        name="statistics_of_shards",
        wrong="An optimizer that needs whole matrices is given shards of them.",
        family=Family.SHARDING,
        layouts=("fsdp2", "tensor_parallel", "spmd", "fsdp2 x tensor_parallel"),
        applies=both(_starts_here, _needs_whole, updates_tell),
        plant=local_updates.update_shards,
        causes=(Cause.LOCAL_STATISTICS,),
        minimum=Minimum(because=OF_SHARDS),
    ),
    Mutant(
        name="parameters_not_gathered_again",
        wrong="Parameters stay gathered after backward: the next forward does not see what the optimizer has updated.",
        family=Family.SHARDING,
        layouts=FULLY_SHARDED,
        applies=both(has_steps, updates_tell),
        plant=sharded.gather_once,
        causes=(Cause.STALE,),
        minimum=Minimum(
            ranks=1, steps=2, because="what is gathered at the first step is right; a single rank keeps a copy as well"
        ),
    ),
    Mutant(
        name="parameters_of_last_step",
        wrong="Each step computes on the parameters that the one before started from.",
        family=Family.SHARDING,
        layouts=("fsdp2", "fsdp1", "ddp", "replicate", "fsdp2 x tensor_parallel"),
        applies=both(has_steps, updates_tell),
        plant=sharded.compute_on_old,
        causes=(Cause.STALE,),
        minimum=Minimum(ranks=1, steps=2, because="the first step has no step before; ranks have nothing to do with it"),
    ),
    Mutant(
        name="updated_shards_not_sent",
        wrong="Each rank updates its share of the parameters and sends it to nobody.",
        family=Family.SHARDING,
        layouts=("ddp",),
        applies=both(_shares_updates, updates_tell),
        plant=sharded.send_no_parameters,
        causes=(Cause.NOT_UPDATED, Cause.RANKS_DISAGREE),
        minimum=Minimum(because="of two ranks, one does not have what the other has updated"),
    ),
)
"""Every mutant of the family."""
