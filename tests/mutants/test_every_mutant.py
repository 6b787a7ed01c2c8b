"""Every known kind of fault has a mutant, and each mutant is caught and diagnosed in its smallest scenario."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache

import pytest

from equivcheck import Outcome, Verdict, check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.mutant import Family
from equivcheck.mutants.registry import mutant, mutants
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import DDP, AdamW, Axis, Checkpointing, Layout, Loss, Mesh, Pipeline, Resume
from equivcheck.worlds.trace.differences import Phase
from mutants.minimums import MINIMUMS
from support.supported import require_mended, require_supported

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of interrupted runs


KINDS: dict[Family, dict[str, tuple[str, ...]]] = {
    Family.DATA_PARALLEL: {
        "all-reduce never runs": ("reduction_missing",),
        "gradients summed, not averaged": ("gradients_summed",),
        "averaged twice": ("averaged_twice", "averaged_over_all_ranks"),
        "one parameter left out of the reduction": ("parameter_left_out",),
        "last bucket dropped": ("last_bucket_kept", "last_bucket_lost"),
        "every rank reads the same slice of the batch": ("same_rows_everywhere", "last_rows_lost", "shuffled_differently"),
        "initial weights not broadcast": ("weights_not_broadcast", "buffers_not_broadcast"),
        "gradients not zeroed between steps": ("gradients_not_zeroed",),
        "forward under no_sync, backward outside": ("forward_without_sync",),
        "calling the wrapped module's inner module": ("inner_module_called",),
        "unused layer with find_unused_parameters=False": ("unused_parameters_not_found",),
    },
    Family.ACCUMULATION: {
        "missing 1/K": ("microbatches_summed",),
        "only the last microbatch kept": ("only_last_microbatch",),
        "rescaled at each microbatch": ("rescaled_each_microbatch",),
        "optimizer steps at each microbatch": ("stepped_each_microbatch",),
        "mean per microbatch instead of over the batch": ("mean_of_means",),
        "trailing window divided by a full one's rows or labels": (
            "trailing_window_divided_as_full",
            "labels_of_first_window_counted",
        ),
        "trailing window never stepped, or never reduced": ("trailing_window_not_stepped", "trailing_window_not_reduced"),
    },
    Family.CLIPPING: {
        "norm of the local shard only": ("local_norm", "norms_added_up"),
        "clip before the reduction": ("clipped_before_reduction", "clamped_before_reduction"),
        "replicas counted in the norm": ("replicas_in_norm",),
        "some parameters left out of the norm": ("vectors_not_in_norm", "first_parameter_not_in_norm"),
        "returned norm wrong, update right": ("norm_after_clipping_returned",),
    },
    Family.SHARDING: {
        "reduce-scatter sums, not averages": ("reduce_scatter_sums", "flat_gradients_summed"),
        "averaged after a loss over all ranks": ("default_divide_factor", "divide_factor_of_root_only"),
        "padded last shard not updated": ("padded_tail_not_updated",),
        "optimizer holds the parameters from before wrapping": ("optimizer_of_unwrapped_parameters",),
        "optimizer state lost at each step": ("state_lost",),
        "optimizer state of one rank used on another": ("state_of_another_rank",),
        "HSDP: no all-reduce across replicas": ("replicas_not_reduced",),
        "mean over chunks of the loss": ("chunks_averaged",),
        "hook over replicas": ("replica_hook_sums", "replica_hook_of_root_only"),
        "experts on all ranks reduced like other parameters": (
            "expert_gradients_not_reduced_over_replicas",
            "expert_gradients_divided_by_shards_only",
        ),
        "fully_shard over ep: gradients not reduced over it": ("gradients_not_reduced_over_ep",),
        "HSDP: divided by the shard count only": ("divided_by_shards_only", "flat_divided_by_shards_only"),
        "statistics computed on local shards": ("statistics_of_shards",),
    },
    Family.TENSOR_PARALLEL: {
        "norm weight gradient not reduced over TP under sequence parallel": ("norm_gradient_not_reduced",),
        "column-parallel backward all-reduce missing": ("column_input_gradient_not_reduced",),
        "the same all-reduce done twice": ("column_input_gradient_reduced_twice",),
        "row-parallel bias added on every rank": ("row_bias_on_every_rank",),
        "row-parallel reduce averages, not sums": ("row_output_averaged",),
        "sharded along the wrong dim": ("sharded_along_wrong_dim",),
        "fused weight split after sharding instead of before": ("fused_weight_split_in_halves",),
        "adapter scaled by ranks, or its first linear's gradient partial": (
            "adapter_scale_divided_by_ranks",
            "adapter_gradient_not_reduced",
        ),
        "shards permuted when reassembled": ("columns_gathered_in_another_order",),
    },
    Family.TOKENS: {
        "labels counted by each rank, microbatch, or both": (
            "labels_counted_by_each_rank",
            "labels_counted_by_microbatch",
            "labels_counted_by_microbatch_of_each_rank",
        ),
        "tokens averaged where sequences are, or sequences over their padding": (
            "tokens_averaged_instead_of_sequences",
            "sequences_averaged_over_ignored_labels",
        ),
        "rows weighted only in the loss, only in the divisor, or like other rows": (
            "row_weights_lost",
            "row_weights_not_counted",
            "row_weights_of_first_rank",
        ),
        "second prediction counted as the first, or with another token's label": (
            "second_prediction_counted_as_first",
            "second_prediction_of_next_token",
            "second_prediction_crosses_documents",
        ),
        "documents attend to each other, or their positions run on": (
            "documents_attend_to_each_other",
            "learned_positions_run_on",
        ),
        "labels across a boundary counted, or tokens counted by document": (
            "labels_across_documents_counted",
            "documents_averaged_instead_of_tokens",
        ),
        "padding counted as labels": ("ignored_labels_counted",),
        "labels of all ranks counted, and gradients averaged": ("labels_of_all_ranks_counted_and_averaged",),
        "ignored label replaced by 0": ("ignored_label_replaced",),
        "label shifted or lost at the boundary of sequence parts": ("labels_shifted_within_parts", "label_lost_at_boundaries"),
        "z-loss scaled wrongly": ("z_loss_summed_over_ranks", "z_loss_lost"),
        "options of the loss lost": ("label_smoothing_lost", "class_weights_lost"),
        "gradients of copied key/value heads not summed": (
            "copied_kv_gradients_not_summed",
            "kv_gradient_of_one_copy",
            "kv_gradients_averaged",
        ),
        "rotary positions of one rank off by one": ("rotary_keys_shifted_on_one_rank",),
        "padding row trained": ("padding_row_trained",),
        "learned positions restart on each part": ("learned_positions_counted_from_parts",),
        "tokens looked up on the wrong rank": ("tokens_of_other_ranks_not_masked",),
        "head untied on ranks": ("tied_head_stale",),
        "tied gradient of one use only": ("tied_head_without_gradient", "tied_embedding_without_gradient"),
        "vocabulary mask off by one": ("vocabulary_mask_off_by_one", "vocabulary_offset_off_by_one"),
        "softmax maximum not reduced": ("softmax_maximum_not_reduced",),
        "softmax denominator not reduced": ("softmax_denominator_not_reduced",),
        "logits gathered in the wrong order": ("logits_gathered_in_another_order",),
        "sequence-parallel norm's gradient not reduced": ("norm_gradient_of_part",),
        "key/value heads repeated in the wrong order": ("kv_heads_repeated_in_another_order",),
        "causal mask lost, or counted from the part's start": ("causal_mask_lost", "causal_mask_of_part"),
        "rotary positions of one part off by one": ("rotary_positions_off_by_one", "rotary_positions_restarted"),
        "gradient multiplied by tp": ("logits_gradient_summed", "head_input_gradient_reduced_twice"),
        "partial input gradients of heads and units within": (
            "head_input_gradient_not_reduced",
            "sharded_heads_input_gradient_not_reduced",
        ),
        "fused gate split after sharding instead of before": ("gate_and_up_split_as_one",),
    },
    Family.EXPERTS: {
        "router weights twice, or not": ("router_weights_applied_twice", "router_weights_not_applied", "router_weights_swapped"),
        "weighted before experts rather than after": ("router_weighs_other_side",),
        "scores normalised before the choice, or not": (
            "router_weights_normalised_before_choice",
            "router_weights_not_normalised",
        ),
        "scores or rows detached": ("router_scores_detached", "experts_input_detached"),
        "other experts, or fewer": ("rows_given_to_next_expert", "second_expert_left_out", "rows_sent_to_next_rank"),
        "tokens dropped beyond a capacity": ("rows_beyond_capacity_dropped",),
        "shared expert on dispatched tokens": ("shared_expert_weighted", "shared_expert_added_for_each_choice"),
        "experts divided by another number of ranks": ("expert_gradients_summed", "expert_gradients_averaged_twice"),
        "units of experts divided as all else, or twice": (
            "expert_units_without_divide_factor",
            "expert_units_divided_explicitly_too",
        ),
        "experts reduced as if they were replicated": ("expert_gradients_averaged_as_replicated",),
        "router gradient of own rows": ("router_gradient_of_own_rows", "only_experts_reduced", "all_but_experts_summed"),
        "counts of the wrong direction": ("counts_sent_taken_for_counts_received",),
        "tokens not put back in order": ("rows_not_put_back_in_order", "rows_split_by_counts_in_another_order"),
        "offsets of groups that are not cumulative": ("offsets_not_cumulative",),
        "a rank without experts that skips a collective": ("rank_without_experts_skips_exchange",),
        "no copy-to before experts that are cut, or for their weights": (
            "experts_copy_to_region_missing",
            "router_learns_from_partial_sum",
        ),
        "bias of the second projection added on every rank": ("bias_of_experts_added_on_every_rank",),
        "fused gate of experts cut as one": ("gate_and_up_of_experts_split_as_one",),
        "auxiliary loss of the local batch": ("balance_of_own_rows",),
        "counts of the wrong axis": ("balance_counted_along_last_axis",),
        "auxiliary loss averaged again, or added again": ("balance_divided_by_ranks", "balance_counted_twice"),
        "auxiliary loss of microbatches": ("balance_summed_over_microbatches", "choices_of_earlier_microbatches_counted"),
        "auxiliary loss of a microbatch, not of a sequence": ("sequence_balance_over_microbatch",),
        "auxiliary loss not scaled by the number of chunks": ("balance_gradient_summed_over_chunks",),
        "auxiliary loss of the last stage only": ("balance_of_last_stage_only",),
        "auxiliary loss detached": ("balance_without_gradient",),
        "router's bias by counts of own rows or of the wrong axis": (
            "router_bias_of_own_rows",
            "router_bias_counted_along_last_axis",
        ),
        "router's bias in weights, or updated too often": ("router_bias_in_weights", "router_bias_updated_each_microbatch"),
        "router's bias by counts of a part of the step": (
            "router_bias_counts_last_microbatch",
            "router_bias_counts_last_chunk",
        ),
    },
    Family.CONTEXT_PARALLEL: {
        "positions counted in a part": ("rotary_positions_of_own_part", "learned_positions_of_own_part"),
        "mask by rank order under head-tail": ("causal_mask_by_order_of_ranks", "keys_left_in_rank_order"),
        "mask counted in a part": ("causal_mask_counted_in_own_part", "ring_blocks_masked_as_own"),
        "boundaries of documents counted in a part": (
            "documents_counted_in_own_part",
            "boundaries_of_labels_counted_in_own_part",
        ),
        "labels shifted or cut otherwise": ("labels_shifted_after_split", "labels_split_contiguously"),
        "keys and values that do not come": ("attention_to_own_positions_only", "ring_ends_before_last_block"),
        "ring without rescaling": ("ring_blocks_not_rescaled",),
        "keys' gradients sliced, not reduced": ("key_gradients_sliced_not_reduced", "ring_gradients_overwritten"),
        "Ulysses heads in another order": ("heads_returned_in_another_order",),
        "mean over unequal parts": ("means_of_unequal_parts_averaged", "labels_counted_by_each_part"),
        "gradients not summed": ("gradients_of_own_positions",),
        "gradients summed at another time, or averaged": ("parts_summed_each_microbatch", "gradients_averaged_over_parts"),
    },
    Family.PIPELINE: {
        "gradients of tied weights not exchanged between stages": ("pipeline_copies_not_summed",),
        "gradients of tied weights exchanged at each microbatch": ("pipeline_copies_summed_each_microbatch",),
        "tied weights counted in the norm by each stage": ("pipeline_copies_in_norm",),
        "norm of a rank's own stages": ("pipeline_norm_of_own_stages",),
        "only the last stage reduced over data-parallel ranks": ("pipeline_last_stage_reduces_only",),
        "chunks lost or summed": ("pipeline_chunk_lost", "pipeline_chunks_summed"),
        "losses of several step() calls divided wrongly": ("pipeline_calls_summed", "pipeline_calls_averaged_equally"),
        "scale_grads with several step() calls": ("pipeline_scales_each_call",),
        "mean for each chunk of unlike size, or padding that counts": (
            "pipeline_chunks_averaged_equally",
            "pipeline_padding_counted",
        ),
        "gradients zeroed between step() calls": ("pipeline_zeroed_between_calls",),
        "gradients reduced before the last step(), or after each": (
            "pipeline_reduced_before_last_call",
            "pipeline_summed_after_each_call",
        ),
    },
    Family.OPTIMIZER: {
        "weight decay on groups that should have none": ("decay_on_groups_without",),
        "coupled instead of decoupled weight decay": ("decay_coupled",),
        "step counter not advanced": ("step_not_counted",),
        "beta2 .99 for .999": ("beta2_lowered",),
        "epsilon 1e-6 for 1e-8": ("eps_enlarged",),
        "schedule stepped once per rank": ("schedule_stepped_each_rank",),
        "schedule stepped once per microbatch": ("schedule_stepped_each_microbatch",),
    },
    Family.PRECISION: {
        "reduction in bf16": ("reduced_in_bfloat16",),
        "master weights in bf16": ("masters_in_bfloat16",),
        "unscaling missing before clipping": ("unscaled_after_clipping",),
        "recomputation draws a new dropout mask": ("mask_redrawn_by_recomputation",),
        "tied weights untied by wrapping": ("tied_weight_stale",),
    },
    Family.RUNTIME: {
        "one rank takes a different branch": ("rank_skips_reduction",),
        "asynchronous result read before wait()": ("read_before_done",),
        "one rank raises, the others wait": ("rank_raises",),
    },
}
"""Known faults in parallel training, with their mutants."""
NAMES = list(mutants())
WITHOUT_VALUES = {
    "rank_skips_reduction": Outcome.HUNG,
    "rank_reduces_once_more": Outcome.HUNG,
    "rank_swaps_calls": Outcome.HUNG,
    "counts_sent_taken_for_counts_received": Outcome.HUNG,
    "rank_without_experts_skips_exchange": Outcome.HUNG,
    "rank_raises": Outcome.CRASHED,
}
"""Mutants whose ranks never finish their step, so no values can differ."""
HIDDEN_FROM_PARAMETERS = ("norm_after_clipping_returned",)
HIDDEN_FROM_GRADIENTS = ("zeroed_before_update", "padded_tail_not_updated", "not_clipped", "optimizer_of_unwrapped_parameters")


@cache
def _caught(name: str) -> Verdict:
    """Verdict on a mutant in its smallest scenario; cached for all tests."""
    return check(MINIMUMS[name], alter=mutant(name).plant)


@pytest.mark.parametrize("family", KINDS)
def test_every_known_kind_of_a_family_has_a_mutant(family: Family) -> None:
    """Every listed kind has a mutant in its family."""
    for kind, names in KINDS[family].items():
        assert names, kind
        assert {mutant(name).family for name in names} == {family}, kind


def test_every_mutant_has_a_minimum() -> None:
    """Every mutant has a scenario, and every scenario has a mutant."""
    assert sorted(MINIMUMS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_can_be_sent_to_processes(name: str) -> None:
    """Faults can be pickled, because ranks may be processes."""
    assert pickle.loads(pickle.dumps(mutant(name).plant)) == mutant(name).plant


@pytest.mark.parametrize("name", NAMES)
def test_a_minimum_is_what_its_mutant_says(name: str) -> None:
    """The scenario has the mutant's ranks, layers and steps, and contains the broken part."""
    found, scenario = mutant(name), MINIMUMS[name]
    size = scenario.layout.mesh.num_ranks, len(scenario.training.model.layers), scenario.training.steps

    assert size == (found.minimum.ranks, found.minimum.layers, found.minimum.steps)
    assert scenario.layout.name in found.layouts
    assert found.applies(scenario)


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_is_caught_in_its_minimum_which_is_equivalent_without_it(name: str) -> None:
    """Only the mutant makes a finding, by its values if there are any, so it is seen without comparing calls.

    The check without the mutant comes last, because the ranks must not keep anything that was planted.
    """
    require_supported(MINIMUMS[name])
    caught = _caught(name)
    honest = check(MINIMUMS[name])
    require_mended(honest)
    assert honest.outcome is Outcome.EQUIVALENT
    assert caught.outcome is WITHOUT_VALUES.get(name, Outcome.DIVERGED)
    assert (caught.divergence is None) is (name in WITHOUT_VALUES)
    assert caught.divergence is None or caught.divergence.phase is not Phase.COMMUNICATION


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_is_diagnosed_rightly_in_its_minimum(name: str) -> None:
    """The cause is one that the mutant lists, found from the ranks' values only."""
    require_supported(MINIMUMS[name])
    found = explained(_caught(name), alter=mutant(name).plant).diagnosis

    assert found is not None
    assert found.cause in mutant(name).causes


@pytest.mark.parametrize("name", [name for name in NAMES if mutant(name).family is Family.CLIPPING])
def test_a_wrong_clipping_reaches_parameters(name: str) -> None:
    """Wrong clipping reaches parameters, unless only the norm is misreported."""
    followers = _caught(name).followers

    assert any(place.startswith("step 0 update") for place in followers) is (name not in HIDDEN_FROM_PARAMETERS)


@pytest.mark.parametrize("name", HIDDEN_FROM_GRADIENTS)
def test_a_mutant_after_backward_leaves_gradients_right(name: str) -> None:
    """In one step, gradients after backward are right."""
    divergence = _caught(name).divergence

    assert divergence is not None
    assert divergence.phase not in (Phase.LOSS, Phase.GRADIENT)


@pytest.mark.parametrize("name", HIDDEN_FROM_PARAMETERS)
def test_a_misreported_norm_is_all_that_differs(name: str) -> None:
    """Gradients and parameters are right; only the norm differs."""
    verdict = _caught(name)

    assert verdict.divergence is not None
    assert verdict.divergence.tensor == "norm"
    assert verdict.followers == ()


@pytest.mark.parametrize("name", ["zeroed_before_update", "clipped_by_own_norms", "row_bias_on_every_rank"])
def test_a_model_with_a_scale_is_explained_as_well(name: str) -> None:
    """Held and unchanged elements are also found for a parameter without dims."""
    plain, chosen = MINIMUMS[name], mutant(name)
    scaled = replace(plain, training=replace(plain.training, model=replace(plain.training.model, scale=True)))
    verdict = explained(check(scaled, alter=chosen.plant), alter=chosen.plant)
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.cause in chosen.causes


@pytest.mark.parametrize("name", ["rotary_positions_restarted", "rotary_positions_off_by_one"])
@pytest.mark.parametrize(("documents", "outcome"), [(2, Outcome.EQUIVALENT), (3, Outcome.DIVERGED)])
def test_wrong_positions_need_a_document_on_several_ranks(name: str, documents: int, outcome: Outcome) -> None:
    """Attention depends on differences of positions within a document. Each rank has two of four positions."""
    smallest, chosen = MINIMUMS[name], mutant(name)
    model = replace(smallest.training.model, length=4, document_length=documents)
    scenario = replace(smallest, training=replace(smallest.training, model=model))
    assert check(scenario, alter=chosen.plant).outcome is outcome
    assert chosen.applies(scenario) is (outcome is Outcome.DIVERGED)


def test_keys_are_shifted_after_a_checkpoint_of_another_layout() -> None:
    """A layout without a plan has no heads on several ranks, so its ranks stay right."""
    smallest, chosen = MINIMUMS["rotary_keys_shifted_on_one_rank"], mutant("rotary_keys_shifted_on_one_rank")
    ranks = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(),))
    scenario = replace(smallest, training=replace(smallest.training, steps=3), resume=Resume(layout=ranks))
    verdict = check(scenario, alter=chosen.plant)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.divergence is not None
    assert verdict.divergence.step > 0


def test_masks_are_redrawn_by_selective_checkpointing() -> None:
    """The recomputation finds all operations of forward again, and uses another mask."""
    smallest, chosen = MINIMUMS["mask_redrawn_by_recomputation"], mutant("mask_redrawn_by_recomputation")
    execution = replace(smallest.layout.execution, checkpointing=Checkpointing.SELECTIVE)
    scenario = replace(smallest, layout=replace(smallest.layout, execution=execution))
    assert check(scenario, alter=chosen.plant).outcome is Outcome.DIVERGED


def test_a_chunk_is_lost_after_a_checkpoint_of_one_chunk() -> None:
    """Without its only chunk, the layout before the checkpoint would have no gradients, which is another fault."""
    smallest, chosen = MINIMUMS["pipeline_chunk_lost"], mutant("pipeline_chunk_lost")
    first = Layout(mesh=smallest.layout.mesh, parallelisms=(Pipeline(),))
    scenario = replace(
        smallest, training=replace(smallest.training, steps=3), resume=Resume(layout=first, flatten_optimizer_state_dict=True)
    )
    verdict = check(scenario, alter=chosen.plant)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.divergence is not None
    assert verdict.divergence.step > 0


def test_a_linear_loss_does_not_depend_on_the_order_of_rows() -> None:
    """It adds up outputs without targets."""
    smallest, chosen = MINIMUMS["rows_gathered_in_another_order"], mutant("rows_gathered_in_another_order")
    scenario = replace(smallest, training=replace(smallest.training, loss=Loss.LINEAR_MEAN))
    assert check(scenario, alter=chosen.plant).outcome is Outcome.EQUIVALENT
    assert not chosen.applies(scenario)


def test_stages_whose_updates_one_rank_sends_are_explained() -> None:
    """Each parameter is on one pipeline rank, and the ZeRO optimizer updates it on one data-parallel rank."""
    smallest, chosen = MINIMUMS["pipeline_last_stage_reduces_only"], mutant("inner_module_called")
    pipeline = replace(smallest.layout.of(Pipeline)[0], static_shapes=True)
    layout = replace(smallest.layout, parallelisms=(pipeline, DDP(zero_redundancy=True)))
    scenario = replace(smallest, training=replace(smallest.training, optimizer=AdamW(), steps=2), layout=layout)
    require_supported(scenario)
    assert chosen.applies(scenario)
    found = explained(check(scenario, alter=chosen.plant), alter=chosen.plant).diagnosis
    assert found is not None
    assert found.cause is Cause.NOT_REDUCED
