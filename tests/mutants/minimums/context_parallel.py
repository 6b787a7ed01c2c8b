"""The smallest scenario for each context-parallel mutant."""

from __future__ import annotations

from equivcheck.scenario import (
    SGD,
    Attention,
    AttentionExchange,
    Axis,
    ContextParallel,
    CrossEntropy,
    Data,
    Head,
    IgnoredLabels,
    Layout,
    LoadBalancer,
    Loss,
    Mesh,
    Model,
    Scenario,
    Tokens,
    Training,
)

CAUSAL, TURNED, WIDE = Attention(), Attention(rotary=True), Attention(num_heads=2, num_kv_heads=2)
LABELS = CrossEntropy()
GATHER, RING, ULYSSES = (
    ContextParallel(exchange=exchange)
    for exchange in (AttentionExchange.GATHER, AttentionExchange.RING, AttentionExchange.ULYSSES)
)
HEAD_TAIL = ContextParallel(balance=LoadBalancer.HEAD_TAIL)


def _cut(  # noqa: PLR0913 - what may matter, by keyword
    parallelism: ContextParallel = GATHER,
    layer: Attention = CAUSAL,
    *,
    length: int = 4,
    source: Tokens | None = None,
    loss: CrossEntropy | Loss = LABELS,
    rows: tuple[int, ...] = (2,),
) -> Scenario:
    is_of_labels = isinstance(loss, CrossEntropy)
    model = Model(
        features=2,
        length=length,
        source=source or Tokens(vocabulary=5) if is_of_labels else None,
        layers=(layer,),
        head=Head() if is_of_labels else None,
    )
    training = Training(model=model, data=Data(microbatches=rows), optimizer=SGD(lr=0.1), loss=loss)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="cp", size=2),)), parallelisms=(parallelism,)))


MINIMUMS: dict[str, Scenario] = {
    "rotary_positions_of_own_part": _cut(layer=TURNED),
    "learned_positions_of_own_part": _cut(source=Tokens(vocabulary=5, learned_positions=True)),
    "causal_mask_by_order_of_ranks": _cut(HEAD_TAIL),
    "causal_mask_counted_in_own_part": _cut(),
    "ring_blocks_masked_as_own": _cut(RING),
    "labels_shifted_after_split": _cut(),
    "labels_split_contiguously": _cut(HEAD_TAIL),
    "attention_to_own_positions_only": _cut(),
    "ring_ends_before_last_block": _cut(RING),
    "ring_blocks_not_rescaled": _cut(RING),
    "key_gradients_sliced_not_reduced": _cut(),
    "ring_gradients_overwritten": _cut(RING),
    "heads_returned_in_another_order": _cut(ULYSSES, WIDE),
    "keys_left_in_rank_order": _cut(HEAD_TAIL),
    "means_of_unequal_parts_averaged": _cut(loss=Loss.MSE_MEAN, length=3),
    "labels_counted_by_each_part": _cut(loss=CrossEntropy(ignored=IgnoredLabels.SOME)),
    "gradients_of_own_positions": _cut(),
    "gradients_averaged_over_parts": _cut(),
    "parts_summed_each_microbatch": _cut(rows=(2, 2)),
}
"""Scenarios by mutant."""
