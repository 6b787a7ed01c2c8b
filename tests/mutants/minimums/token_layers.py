"""The smallest scenario for each mutant in attention, vocabulary parallelism and reductions around token layers."""

from __future__ import annotations

from equivcheck.scenario import (
    DDP,
    SGD,
    ActivationSharding,
    AnyLayer,
    Attention,
    Axis,
    CrossEntropy,
    Data,
    GatedMLP,
    Head,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Norm,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
)

POSITIONS, WHOLE = ActivationSharding.ROWS, ActivationSharding.REPLICATED
LAYER, CAUSAL, GROUPED = Layer(width=2), Attention(), Attention(num_heads=2)
TURNED = Attention(rotary=True, causal=False)


def _training(layer: AnyLayer, head: Head, length: int) -> Training:
    model = Model(features=2, length=length, source=Tokens(vocabulary=4), layers=(layer,), head=head)
    return Training(model=model, data=Data(microbatches=(2,)), optimizer=SGD(lr=0.1), loss=CrossEntropy())


def _alone(layer: AnyLayer) -> Scenario:
    """One rank."""
    return Scenario(
        training=_training(layer, Head(), 2), layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=1),)), parallelisms=(DDP(),))
    )


def _on_2(  # noqa: PLR0913 - what a plan says, by keyword
    layer: AnyLayer = LAYER,
    split: Split = Split.REPLICATED,
    *,
    source: Split = Split.REPLICATED,
    head: Split = Split.REPLICATED,
    by_positions: bool = False,
    ends: Head = Head(),  # noqa: B008 - frozen
    length: int = 2,
) -> Scenario:
    """Two tensor-parallel ranks, optionally with sequence parallelism around the layer."""
    lies = POSITIONS if by_positions else WHOLE
    plan = TensorParallel(plan=(LayerPlan(split=split, output=lies),), source=source, source_output=lies, head=head)
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(plan,))
    return Scenario(training=_training(layer, ends, length), layout=layout)


BY_CLASSES = _on_2(head=Split.COLWISE)
BY_TOKENS = _on_2(source=Split.ROWWISE, length=8)

MINIMUMS: dict[str, Scenario] = {
    "causal_mask_lost": _alone(CAUSAL),
    "causal_mask_of_part": _on_2(CAUSAL, by_positions=True),
    "rotary_positions_restarted": _on_2(TURNED, by_positions=True),
    "rotary_positions_off_by_one": _on_2(TURNED, by_positions=True),
    "kv_heads_repeated_in_another_order": _alone(Attention(num_heads=4, num_kv_heads=2)),
    "copied_kv_gradients_not_summed": _on_2(GROUPED),
    "vocabulary_mask_off_by_one": BY_TOKENS,
    "vocabulary_offset_off_by_one": BY_TOKENS,
    "logits_gathered_in_another_order": BY_CLASSES,
    "softmax_maximum_not_reduced": BY_CLASSES,
    "softmax_denominator_not_reduced": BY_CLASSES,
    "head_input_gradient_not_reduced": BY_CLASSES,
    "head_input_gradient_reduced_twice": BY_CLASSES,
    "sharded_heads_input_gradient_not_reduced": _on_2(GatedMLP(hidden=2), Split.HEADS_OR_HIDDEN),
    "norm_gradient_of_part": _on_2(by_positions=True, ends=Head(norm=Norm.RMS)),
    "logits_gradient_summed": _on_2(),
    "gate_and_up_split_as_one": _on_2(GatedMLP(hidden=2), Split.HEADS_OR_HIDDEN),
}
"""Scenarios by mutant."""
