"""The smallest scenario for each mutant in expert layers: on one rank, expert-parallel, or with split hidden features."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.parallelisms.fsdp2.division import FACTOR_OF_ALL_RANKS
from equivcheck.scenario import (
    DDP,
    FSDP2,
    AnyLayer,
    Axis,
    Data,
    ExpertParallel,
    Experts,
    ExpertStorage,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Mesh,
    Model,
    Norm,
    Pipeline,
    Precision,
    Scenario,
    ScoreFunction,
    Split,
    Training,
)
from equivcheck.system.torch_version import is_torch_in

PLAIN = Experts(hidden=2)
NORMED = Experts(hidden=2, norm=Norm.RMS)
BIASED = Experts(hidden=2, bias=True)
PAIR = Experts(hidden=2, num_experts=3, top_k=2)
NORMALISED = Experts(hidden=2, num_experts=3, top_k=2, normalised=True, scores=ScoreFunction.SIGMOID)
SHARED = Experts(hidden=2, num_experts=3, top_k=2, shared=True)
FOUR = Experts(hidden=2, num_experts=4)
BALANCED = Experts(hidden=2, balance=0.1)
BALANCED_BY_SEQUENCE = Experts(hidden=2, balance=0.1, balance_per_sequence=True)
BIAS = Experts(hidden=2, router_bias_rate=0.5)
GROUPED = Experts(hidden=4, dispatched=True, grouped=True)


def _training(layer: AnyLayer, *rows: int) -> Training:
    return Training(model=Model(features=2, layers=(layer,)), data=Data(microbatches=rows))


def _alone(layer: AnyLayer, *rows: int) -> Scenario:
    """One rank."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=1),)), parallelisms=(DDP(),))
    return Scenario(training=_training(layer, *rows or (4,)), layout=layout)


def _in_groups() -> Scenario:
    """Sizes and a precision that `grouped_mm` accepts."""
    training = replace(_training(GROUPED, 4), precision=Precision.FLOAT32)
    return replace(_alone(GROUPED), training=replace(training, model=replace(training.model, features=4)))


def _in_chunks(layer: AnyLayer, *rows: int) -> Scenario:
    """One rank with one stage, which computes each microbatch in two chunks."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="pp", size=1),)), parallelisms=(Pipeline(num_chunks=2),))
    return Scenario(training=_training(layer, *rows), layout=layout)


def _in_two_stages(layer: AnyLayer) -> Scenario:
    """Two ranks with one layer each."""
    training = _training(layer, 4)
    training = replace(training, model=replace(training.model, layers=(layer, layer)))
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="pp", size=2),)), parallelisms=(Pipeline(),)))


def _with_steps(scenario: Scenario, steps: int) -> Scenario:
    return replace(scenario, training=replace(scenario.training, steps=steps))


def _by_rows(layer: AnyLayer, **axes: int) -> Scenario:
    """Rows over ranks along one or two axes."""
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items()))
    layout = Layout(mesh=mesh, parallelisms=(FSDP2() if len(axes) > 1 else DDP(),))
    return Scenario(training=_training(layer, 4), layout=layout)


def _over_all_ranks(layer: AnyLayer) -> Scenario:
    """Experts sharded over two replicas."""
    mesh = Mesh(axes=(Axis(name="dp_replicate", size=2), Axis(name="dp_shard", size=1)))
    layout = Layout(mesh=mesh, parallelisms=(FSDP2(experts_on_all_ranks=True),))
    return Scenario(training=_training(layer, 4), layout=layout)


def _shared_out(layer: AnyLayer, ranks: int = 2, rows: int = 12) -> Scenario:
    layout = Layout(mesh=Mesh(axes=(Axis(name="ep", size=ranks),)), parallelisms=(ExpertParallel(),))
    return Scenario(training=_training(layer, rows), layout=layout)


def _cut_within(layer: AnyLayer, rows: int = 4) -> Scenario:
    plan = LocalTensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),))
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(plan,))
    return Scenario(training=_training(layer, rows), layout=layout)


def _units_of_shards(layer: AnyLayer) -> Scenario:
    """Float32, because torch divides float64 gradients twice over one shard; a sum loss, because a mean cannot divide so."""
    axes = (Axis(name="dp", size=1), Axis(name="ep", size=2))
    fsdp = FSDP2(sum_reductions=is_torch_in(FACTOR_OF_ALL_RANKS))
    parallelisms = (ExpertParallel(storage=ExpertStorage.DTENSOR), fsdp)
    training = replace(_training(layer, 12), precision=Precision.FLOAT32)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=parallelisms))


def _over_ep() -> Scenario:
    """A linear whose weight is sharded over two expert-parallel ranks. torch divides gradients of experts twice if `dp` is 1."""
    mesh = Mesh(axes=(Axis(name="dp", size=1), Axis(name="ep", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(ExpertParallel(storage=ExpertStorage.DTENSOR), FSDP2(shard_over_ep=True)))
    return Scenario(training=_training(Layer(width=2), 4), layout=layout)


MINIMUMS: dict[str, Scenario] = {
    "router_weights_applied_twice": _alone(PLAIN),
    "router_weights_not_applied": _alone(PLAIN),
    "router_weights_swapped": _alone(PAIR),
    "router_weights_not_normalised": _alone(NORMALISED),
    "router_weights_normalised_before_choice": _alone(NORMALISED),
    "router_weighs_other_side": _alone(PLAIN),
    "router_scores_detached": _alone(NORMED),
    "experts_input_detached": _alone(NORMED),
    "rows_given_to_next_expert": _alone(PLAIN),
    "second_expert_left_out": _alone(PAIR),
    "rows_beyond_capacity_dropped": _alone(PLAIN, 9),
    "shared_expert_weighted": _alone(SHARED),
    "shared_expert_added_for_each_choice": _alone(SHARED),
    "rows_not_put_back_in_order": _shared_out(FOUR),
    "rows_split_by_counts_in_another_order": _shared_out(FOUR),
    "counts_sent_taken_for_counts_received": _shared_out(PLAIN),
    "offsets_not_cumulative": _in_groups(),
    "rank_without_experts_skips_exchange": _shared_out(PLAIN, ranks=3),
    "rows_sent_to_next_rank": _shared_out(PLAIN),
    "expert_gradients_summed": _shared_out(PLAIN),
    "expert_gradients_averaged_twice": _shared_out(PLAIN),
    "expert_gradients_averaged_as_replicated": _shared_out(PLAIN),
    "expert_gradients_not_reduced_over_replicas": _over_all_ranks(PLAIN),
    "expert_gradients_divided_by_shards_only": _over_all_ranks(PLAIN),
    "gradients_not_reduced_over_ep": _over_ep(),
    "router_gradient_of_own_rows": _shared_out(NORMED),
    "only_experts_reduced": _shared_out(NORMED),
    "all_but_experts_summed": _shared_out(NORMED),
    "experts_copy_to_region_missing": _cut_within(NORMED),
    "router_learns_from_partial_sum": _cut_within(PLAIN),
    "bias_of_experts_added_on_every_rank": _cut_within(BIASED),
    "gate_and_up_of_experts_split_as_one": _cut_within(PLAIN),
    "balance_of_own_rows": _by_rows(BALANCED, dp=2),
    "balance_counted_along_last_axis": _by_rows(BALANCED, dp_replicate=2, dp_shard=2),
    "balance_divided_by_ranks": _by_rows(BALANCED, dp=2),
    "balance_counted_twice": _alone(BALANCED),
    "balance_summed_over_microbatches": _alone(BALANCED, 4, 4),
    "balance_without_gradient": _alone(BALANCED),
    "choices_of_earlier_microbatches_counted": _alone(BALANCED, 3, 4),
    "sequence_balance_over_microbatch": _alone(BALANCED_BY_SEQUENCE),
    "balance_gradient_summed_over_chunks": _in_chunks(BALANCED_BY_SEQUENCE, 8),
    "balance_of_last_stage_only": _in_two_stages(BALANCED_BY_SEQUENCE),
    "router_bias_of_own_rows": _by_rows(BIAS, dp=2),
    "router_bias_counted_along_last_axis": _by_rows(BIAS, dp_replicate=2, dp_shard=2),
    "router_bias_in_weights": _with_steps(_alone(BIAS), 2),
    "router_bias_updated_each_microbatch": _alone(BIAS, 4, 4),
    "router_bias_counts_last_microbatch": _alone(BIAS, 5, 2),
    "router_bias_counts_last_chunk": _in_chunks(BIAS, 8),
    "expert_units_without_divide_factor": _units_of_shards(PLAIN),
    "expert_units_divided_explicitly_too": _units_of_shards(PLAIN),
}
"""Scenarios by mutant."""
