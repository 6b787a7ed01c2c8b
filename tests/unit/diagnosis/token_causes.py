"""Causes in token models and experts, each with its mutant's smallest scenario."""

from dataclasses import replace

from equivcheck.oracle.verdict.cause import Cause
from mutants.minimums import MINIMUMS
from unit.diagnosis.causes import Example


def _example(cause: Cause, name: str, words: str) -> Example:
    return Example(cause=cause, scenario=MINIMUMS[name], fault=name, words=words)


_SUMMED = MINIMUMS["labels_not_counted"]
_WITH_SMALLER_LAST_STEP = replace(
    _SUMMED, training=replace(_SUMMED.training, data=replace(_SUMMED.training.data, microbatches=(4, 4), last_window=1), steps=2)
)

EXAMPLES = (
    _example(Cause.ROUTER_WEIGHTS, "router_weights_applied_twice", "in `layers.0` routing weights are applied twice"),
    _example(Cause.EXPERT_CHOICE, "rows_given_to_next_expert", "computed by the expert after the chosen one"),
    _example(Cause.SHARED_EXPERT, "shared_expert_weighted", "the shared expert is weighted by the router"),
    _example(Cause.EXPERT_GRADIENT, "experts_input_detached", "the experts' input is detached"),
    _example(Cause.EXPERT_ROWS, "rows_not_put_back_in_order", "are returned in expert order"),
    _example(
        Cause.EXPERT_BALANCE,
        "balance_of_own_rows",
        "of `layers.0` uses each rank's own expert counts, not their sum over the 2 dp ranks",
    ),
    _example(
        Cause.ROUTER_BIAS,
        "router_bias_of_own_rows",
        "updates routers' biases by its own expert counts, not by their sum over the 2 dp ranks",
    ),
    _example(Cause.REDUCED_OVER_OTHERS, "expert_gradients_averaged_as_replicated", "although each rank holds different experts"),
    _example(Cause.KEY_VALUE_GRADIENT, "ring_gradients_overwritten", "from queries on the rank before theirs only"),
    _example(Cause.PADDING_TRAINED, "padding_row_trained", "as if `padding_idx` were not set"),
    _example(Cause.ANOTHER_LOSS, "z_loss_summed_over_ranks", "the z-loss is summed over the 2 dp ranks, not averaged"),
    _example(Cause.ANOTHER_LABEL, "label_lost_at_boundaries", "the last label in each sequence shard on"),
    _example(
        Cause.LABEL_COUNT, "labels_counted_by_each_rank", "each of the 2 dp ranks divides the loss by its own counted labels"
    ),
    Example(
        cause=Cause.LABEL_COUNT,
        scenario=_WITH_SMALLER_LAST_STEP,
        fault="labels_not_counted",
        words="the loss is divided by 1: it is the sum over labels",
    ),
    _example(Cause.LABEL_WEIGHTS, "row_weights_of_first_rank", "each of the 2 dp ranks weights its rows like those of the first"),
    _example(Cause.POSITIONS, "rotary_positions_off_by_one", "one too high from tensor-parallel rank 1 on"),
    _example(Cause.ATTENTION_MASK, "causal_mask_lost", "attention in `layers.0` sees later positions as well"),
    _example(Cause.KV_HEADS, "copied_kv_gradients_not_summed", "does not sum the gradients of replicated key and value heads"),
    _example(Cause.ANOTHER_ROW, "vocabulary_mask_off_by_one", "the last token of each vocabulary shard"),
    _example(Cause.SOFTMAX_OF_PART, "softmax_maximum_not_reduced", "subtracts the maximum of its own logits"),
)
