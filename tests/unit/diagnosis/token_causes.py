"""The causes of token models and of experts, each with the smallest scenario of a mutant that shows it."""

from equivcheck.oracle.verdict.cause import Cause
from mutants.minimums import MINIMUMS
from unit.diagnosis.causes import Example


def _example(cause: Cause, name: str, words: str) -> Example:
    return Example(cause=cause, scenario=MINIMUMS[name], fault=name, words=words)


EXAMPLES = (
    _example(Cause.ROUTER_WEIGHTS, "router_weights_applied_twice", "in `layers.0` weights of the chosen experts count twice"),
    _example(Cause.EXPERT_CHOICE, "rows_given_to_next_expert", "computed by the expert after the one that they have chosen"),
    _example(Cause.SHARED_EXPERT, "shared_expert_weighted", "the shared expert is weighted by the router"),
    _example(Cause.EXPERT_GRADIENT, "experts_input_detached", "what experts read is detached"),
    _example(Cause.EXPERT_ROWS, "rows_not_put_back_in_order", "goes back expert by expert"),
    _example(Cause.EXPERT_BALANCE, "balance_of_own_rows", "of `layers.0` goes by what each of the 2 dp ranks alone chooses"),
    _example(Cause.REDUCED_OVER_OTHERS, "expert_gradients_averaged_as_replicated", "which hold others each"),
    _example(Cause.KEY_VALUE_GRADIENT, "ring_gradients_overwritten", "from positions of the rank before theirs alone"),
    _example(Cause.PADDING_TRAINED, "padding_row_trained", "the embedding has forgotten its padding"),
    _example(Cause.ANOTHER_LOSS, "z_loss_summed_over_ranks", "the z-loss is summed over the 2 dp ranks, not averaged"),
    _example(Cause.ANOTHER_LABEL, "label_lost_at_borders", "the label of the last position of each of the parts"),
    _example(Cause.LABEL_COUNT, "labels_counted_by_each_rank", "divided by the labels that count of each of the 2 dp ranks"),
    _example(Cause.POSITIONS, "rotary_positions_off_by_one", "one too many from those of tensor-parallel rank 1 on"),
    _example(Cause.ATTENTION_MASK, "causal_mask_lost", "attention in `layers.0` sees later positions as well"),
    _example(Cause.KV_HEADS, "copied_kv_gradients_not_summed", "copied key and value of each rank's own heads, not summed"),
    _example(Cause.ANOTHER_ROW, "vocabulary_mask_off_by_one", "the last token of each part of the vocabulary"),
    _example(Cause.SOFTMAX_OF_PART, "softmax_maximum_not_reduced", "subtracts the maximum of its own logits"),
)
