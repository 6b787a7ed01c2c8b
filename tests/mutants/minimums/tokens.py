"""The smallest scenario for each token mutant."""

from __future__ import annotations

from equivcheck.scenario import (
    DDP,
    FSDP2,
    ActivationSharding,
    AnyLayer,
    Attention,
    Axis,
    CrossEntropy,
    Data,
    Head,
    IgnoredLabels,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)

PLAIN = DDP()
LAYER = Layer(width=2)
CHUNKED = FSDP2(wrapping=Wrapping.PER_LAYER, head_unit=True, loss_chunks=2)
TOKENS = Tokens(vocabulary=4)
HEAD = Head()
ALL_LABELS = CrossEntropy()
LABELS = CrossEntropy(ignored=IgnoredLabels.FIRST_ROWS)
BY_POSITIONS = TensorParallel(plan=(LayerPlan(split=Split.REPLICATED, output=ActivationSharding.ROWS),), head=Split.REPLICATED)

BY_HEADS = TensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),), head=Split.REPLICATED)
PLACED = Tokens(vocabulary=4, learned_positions=True)
BY_TOKENS = TensorParallel(
    plan=(LayerPlan(split=Split.REPLICATED),),
    source=Split.ROWWISE,
    source_output=ActivationSharding.ROWS,
    head=Split.REPLICATED,
)


def _scenario(  # noqa: PLR0913 - what a minimum may have
    *layers: AnyLayer,
    ranks: int = 1,
    by: Parallelism = PLAIN,
    microbatches: tuple[int, ...] = (2,),
    source: Tokens = TOKENS,
    head: Head = HEAD,
    length: int = 2,
    loss: CrossEntropy = ALL_LABELS,
    steps: int = 1,
    seed: int = 0,
) -> Scenario:
    model = Model(features=2, length=length, source=source, layers=layers or (LAYER,), head=head)
    axis = "tp" if isinstance(by, TensorParallel) else "dp"
    return Scenario(
        training=Training(model=model, data=Data(microbatches=microbatches), loss=loss, steps=steps, seed=seed),
        layout=Layout(mesh=Mesh(axes=(Axis(name=axis, size=ranks),)), parallelisms=(by,)),
    )


MINIMUMS: dict[str, Scenario] = {
    "chunks_averaged": _scenario(by=CHUNKED),
    "labels_counted_by_each_rank": _scenario(ranks=2, microbatches=(4,), loss=CrossEntropy(ignored=IgnoredLabels.SOME), seed=5),
    "labels_counted_by_microbatch": _scenario(microbatches=(1, 1), loss=CrossEntropy(ignored=IgnoredLabels.FIRST_MICROBATCH)),
    "labels_counted_by_microbatch_of_each_rank": _scenario(
        ranks=2, microbatches=(4, 4), loss=CrossEntropy(ignored=IgnoredLabels.SOME)
    ),
    "ignored_labels_counted": _scenario(loss=LABELS),
    "labels_counted_without_class_weights": _scenario(loss=CrossEntropy(class_weights=True)),
    "labels_not_counted": _scenario(),
    "labels_of_all_ranks_counted_and_averaged": _scenario(ranks=2),
    "ignored_label_replaced": _scenario(loss=LABELS),
    "labels_shifted_within_parts": _scenario(ranks=2, by=BY_POSITIONS, length=4),
    "label_lost_at_boundaries": _scenario(ranks=2, by=BY_POSITIONS),
    "z_loss_summed_over_ranks": _scenario(ranks=2, loss=CrossEntropy(z_loss=0.5)),
    "z_loss_lost": _scenario(loss=CrossEntropy(z_loss=0.5)),
    "label_smoothing_lost": _scenario(loss=CrossEntropy(label_smoothing=0.5)),
    "class_weights_lost": _scenario(loss=CrossEntropy(class_weights=True)),
    "kv_gradient_of_one_copy": _scenario(Attention(num_heads=2)),
    "kv_gradients_averaged": _scenario(Attention(num_heads=2)),
    "rotary_keys_shifted_on_one_rank": _scenario(Attention(num_heads=2, num_kv_heads=2, rotary=True), ranks=2, by=BY_HEADS),
    "padding_row_trained": _scenario(source=Tokens(vocabulary=2, padding=1)),
    "learned_positions_counted_from_parts": _scenario(ranks=2, by=BY_TOKENS, source=PLACED),
    "positions_added_on_every_rank": _scenario(ranks=2, by=BY_TOKENS, source=PLACED),
    "tokens_of_other_ranks_not_masked": _scenario(ranks=2, by=BY_TOKENS),
    "embedding_averaged_over_ranks": _scenario(ranks=2, by=BY_TOKENS),
    "tied_head_without_gradient": _scenario(head=Head(tied=True)),
    "tied_embedding_without_gradient": _scenario(head=Head(tied=True)),
    "tied_head_stale": _scenario(head=Head(tied=True), steps=2),
}
"""Scenarios by mutant."""
