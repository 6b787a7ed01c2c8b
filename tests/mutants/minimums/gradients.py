"""The smallest scenario for each mutant in data parallelism, accumulation, clipping and sharding."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    AuxiliaryLinear,
    Axis,
    ClipNorm,
    ClipValue,
    Data,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Muon,
    NormType,
    Parallelism,
    Precision,
    Scenario,
    ShardingStrategy,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP

LAYER = Layer(width=2)
PLAIN = DDP()
SHARDED = FSDP2()
HOOKED = FSDP2(replica_hook=True)
SUMMED = FSDP2(gradient_divide_factor=1.0, sum_reductions=True)


def on_mesh(sizes: dict[str, int], *by: Parallelism, layer: Layer = LAYER, offset: bool = False, **training: object) -> Scenario:
    """A model with one layer on a mesh; parallelisms innermost first."""
    model = Model(features=2, layers=(layer,), offset=offset)
    data = training.pop("data", Data(microbatches=(2,)))
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()))
    return Scenario(
        training=Training(model=model, data=data, **training),  # type: ignore[arg-type]
        layout=Layout(mesh=mesh, parallelisms=by),
    )


def over(ranks: int, by: Parallelism = PLAIN, **options: object) -> Scenario:
    """One layer on some data-parallel ranks."""
    return on_mesh({DP: ranks}, by, **options)  # type: ignore[arg-type]


def accumulated(ranks: int = 1, *, by: Parallelism = PLAIN, microbatches: tuple[int, ...] = (2, 2)) -> Scenario:
    """Several microbatches."""
    return over(ranks, by, data=Data(microbatches=microbatches))


def in_backward(scenario: Scenario) -> Scenario:
    """Each parameter is updated in backward."""
    layout = replace(scenario.layout, execution=Execution(optimizer_in_backward=True))
    return replace(scenario, layout=layout)


def clipped(ranks: int = 1, *, by: Parallelism = PLAIN, max_norm: float = 0.01) -> Scenario:
    """Clipping by the 2-norm."""
    return over(ranks, by, clipping=ClipNorm(max_norm=max_norm))


def beside(sizes: dict[str, int]) -> Scenario:
    """`DistributedDataParallel` around tensor parallelism that splits nothing."""
    return on_mesh(sizes, TensorParallel(plan=(LayerPlan(),)), PLAIN)


REMEMBERING = SGD(momentum=0.9)
HYBRID = {REPLICATE: 2, SHARD: 1}
FLAT = FSDP1(strategy=ShardingStrategy.FULL_SHARD)
HYBRID_FLAT = FSDP1(strategy=ShardingStrategy.HYBRID_SHARD)

MINIMUMS: dict[str, Scenario] = {
    "reduction_missing": over(2),
    "gradients_summed": over(2),
    "averaged_twice": over(2),
    "averaged_over_all_ranks": beside({DP: 1, TP: 2}),
    "reduced_over_other_axis": beside({DP: 2, TP: 1}),
    "parameter_left_out": over(2),
    "last_bucket_kept": over(2),
    "last_bucket_lost": over(2),
    "same_rows_everywhere": over(2),
    "last_rows_lost": over(2),
    "shuffled_differently": over(2),
    "rank_left_out": over(2),
    "weights_not_broadcast": over(2),
    "buffers_not_broadcast": over(2, offset=True),
    "gradients_not_zeroed": over(1, steps=2),
    "gradients_of_last_step": over(1, steps=2),
    "zeroed_before_update": over(1),
    "forward_without_sync": over(2),
    "inner_module_called": over(2),
    "unused_parameters_not_found": over(
        2, DDP(find_unused_parameters=True), layer=Layer(width=2, auxiliary=AuxiliaryLinear.NEVER)
    ),
    "microbatches_summed": accumulated(),
    "microbatches_averaged_twice": accumulated(),
    "rescaled_each_microbatch": accumulated(),
    "only_last_microbatch": accumulated(),
    "only_first_microbatch": accumulated(),
    "last_microbatch_lost": accumulated(),
    "last_microbatch_lost_on_one_rank": accumulated(2),
    "same_microbatch": accumulated(),
    "mean_of_means": accumulated(microbatches=(2, 1)),
    "sum_averaged_over_ranks": over(2, loss=Loss.MSE_SUM),
    "reduced_after_first_microbatch": accumulated(2, by=DDP(no_sync=True)),
    "stepped_each_microbatch": accumulated(),
    "updated_before_reduction": over(2),
    "updated_in_each_backward": in_backward(accumulated(by=SHARDED)),
    "local_norm": clipped(2, by=SHARDED),
    "norms_added_up": clipped(2, by=SHARDED),
    "clipped_before_reduction": clipped(2),
    "clamped_before_reduction": over(2, clipping=ClipValue(clip_value=0.1)),
    "replicas_in_norm": clipped(2),
    "vectors_not_in_norm": clipped(),
    "first_parameter_not_in_norm": clipped(),
    "clipped_by_own_norms": clipped(),
    "another_norm_type": over(1, clipping=ClipNorm(max_norm=0.01, norm_type=NormType.INF)),
    "norm_after_clipping_returned": clipped(),
    "not_clipped": clipped(),
    "scaled_up_to_norm": clipped(max_norm=100.0),
    "reduce_scatter_sums": over(2, SHARDED),
    "flat_gradients_summed": over(2, FLAT, precision=Precision.FLOAT32),
    "default_divide_factor": over(2, SUMMED),
    "divide_factor_of_root_only": over(2, replace(SUMMED, wrapping=Wrapping.PER_LAYER)),
    "replica_hook_sums": on_mesh(HYBRID, HOOKED),
    "replica_hook_of_root_only": on_mesh(HYBRID, replace(HOOKED, wrapping=Wrapping.PER_LAYER)),
    "reduce_scatter_missing": over(2, SHARDED),
    "reduce_scatter_shifted": over(2, SHARDED),
    "replicas_not_reduced": on_mesh(HYBRID, SHARDED),
    "divided_by_shards_only": on_mesh(HYBRID, SHARDED),
    "flat_divided_by_shards_only": on_mesh({REPLICATE: 2, SHARD: 2}, HYBRID_FLAT, data=Data(microbatches=(4,))),
    "divided_by_replicas_only": on_mesh({REPLICATE: 1, SHARD: 2}, SHARDED),
    "padded_tail_not_updated": over(2, SHARDED, layer=Layer(width=3)),
    "optimizer_of_unwrapped_parameters": over(1, SHARDED),
    "state_lost": over(1, SHARDED, optimizer=REMEMBERING, steps=2),
    "state_of_another_rank": over(2, SHARDED, optimizer=REMEMBERING, steps=2),
    "statistics_of_shards": over(2, SHARDED, layer=Layer(width=2, bias=False), optimizer=Muon(ns_steps=1)),
    "parameters_not_gathered_again": over(1, SHARDED, steps=2),
    "parameters_of_last_step": over(1, SHARDED, steps=2),
    "updated_shards_not_sent": over(2, DDP(zero_redundancy=True)),
}
"""Scenarios by mutant."""
