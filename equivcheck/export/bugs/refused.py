"""Mutants that no script has: the reason, and whose it is."""

from __future__ import annotations

_LOOKED_UP = "what a rank looks up in its rows of an embedding is inside DTensor, of which a script has the call alone"
_SOFTMAX = (
    "how ranks put their logits and the parts of a softmax together is inside DTensor, of which a script has the call alone"
)
_SUMS = "the sum over ranks that it changes is made by DTensor or parallelize_module, of which a script has the call alone"
_POSITIONS = "positions within attention are counted in functions that both runs of a script share"
_FUSED = "a script has a gate and an upward linear by themselves, never as one weight"
_RING = "how a ring puts blocks together, and its derivative, stand in one function, of which the mutant has another"
_SENT = "what expert_parallel does with rows and gradients stands in functions of a script, for which nobody has written others"
_ADDENDS = "how values move around experts that are cut stands in functions of a script, for which nobody has written others"
_COUNTED = "how choices are counted stands in a function that both runs of a script share, and knows no microbatch but its own"

REASONS: dict[str, str] = {
    "vocabulary_mask_off_by_one": _LOOKED_UP,
    "vocabulary_offset_off_by_one": _LOOKED_UP,
    "tokens_of_other_ranks_not_masked": _LOOKED_UP,
    "embedding_averaged_over_ranks": _LOOKED_UP,
    "logits_gathered_in_another_order": _SOFTMAX,
    "softmax_maximum_not_reduced": _SOFTMAX,
    "softmax_denominator_not_reduced": _SOFTMAX,
    "head_input_gradient_not_reduced": _SUMS,
    "head_input_gradient_reduced_twice": _SUMS,
    "within_input_gradient_not_reduced": _SUMS,
    "norm_gradient_of_part": _SUMS,
    "copied_kv_gradients_not_summed": _SUMS,
    "causal_mask_of_part": _POSITIONS,
    "rotary_positions_restarted": _POSITIONS,
    "rotary_positions_off_by_one": _POSITIONS,
    "rotary_keys_shifted_on_one_rank": _POSITIONS,
    "gate_and_up_cut_as_one": _FUSED,
    "ring_blocks_not_rescaled": _RING,
    "rows_not_put_back_in_order": _SENT,
    "rows_split_by_counts_in_another_order": _SENT,
    "counts_sent_taken_for_counts_received": _SENT,
    "rank_without_experts_skips_exchange": _SENT,
    "rows_sent_to_next_rank": _SENT,
    "expert_gradients_summed": _SENT,
    "expert_gradients_averaged_twice": _SENT,
    "expert_gradients_averaged_as_replicated": _SENT,
    "router_gradient_of_own_rows": _SENT,
    "only_experts_reduced": _SENT,
    "all_but_experts_summed": _SENT,
    "experts_copy_to_region_missing": _ADDENDS,
    "router_learns_from_addend_of_rank": _ADDENDS,
    "bias_of_experts_added_on_every_rank": _ADDENDS,
    "gate_and_up_of_experts_cut_as_one": _ADDENDS,
    "choices_of_earlier_microbatches_counted": _COUNTED,
}
"""By the name of the mutant; others that no script has are those of which nobody has written lines."""
