"""Strategies for token models: an embedding, any layers over positions, a head.

Some take sequences of real numbers instead of tokens.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivcheck.scenario import (
    Activation,
    AnyLayer,
    Attention,
    CrossEntropy,
    Experts,
    GatedMLP,
    Head,
    IgnoredLabels,
    Layer,
    LoRALinear,
    Model,
    Norm,
    Normaliser,
    ScoreFunction,
    Tokens,
)
from equivcheck.strategies.chance import EVENLY, MOSTLY, RARELY, SOMETIMES
from equivcheck.strategies.layer import ACTIVATIONS
from equivcheck.training.layers.registry import third_party_kinds

LENGTHS: SearchStrategy[int] = st.sampled_from((2, 3, 4, 1, 5, 8))
"""Sequence lengths. All lists here are short, because DTensor caches its results by shape."""
VOCABULARIES: SearchStrategy[int] = st.sampled_from((3, 4, 5, 7, 8, 11, 16))
IGNORED: SearchStrategy[IgnoredLabels] = st.sampled_from(IgnoredLabels)

_FEATURES = st.sampled_from((4, 2, 6, 8, 3, 1))
_DOCUMENT_LENGTHS = st.sampled_from((None, None, None, 2, 3, 4))
_HIDDEN = st.sampled_from((1, 2, 3, 4, 6, 8))
_WIDTHS = st.sampled_from((2, 4, 1, 3))
_KV_HEADS = st.sampled_from((1, 2, 3, 4))
_ADAPTERS = {
    Activation.RELU: LoRALinear(rank=2, alpha=4.0),
    Activation.GELU: LoRALinear(rank=1),
    Activation.TANH: LoRALinear(rank=3),
    Activation.SIGMOID: LoRALinear(rank=4, alpha=4.0),
    Activation.SILU: LoRALinear(rank=2),
}
"""Layers with an adapter that take the place of linear layers with this activation."""
_GROUPED = (Activation.SILU, Activation.GELU, Activation.SIGMOID)
"""Dispatched experts with these activations use `grouped_mm` if their sizes fit."""
_GROUPED_MULTIPLE = 4
"""Features and hidden features are divisible by this number, because 4 float32 elements have 16 bytes."""
_GROUPS = st.sampled_from((1, 2, 3))
_DEPTHS = st.sampled_from((1, 2, 3, 4, 5))
_NORMS = st.sampled_from((None, Norm.RMS, Norm.LAYER))
_DROPOUTS = st.sampled_from((0.0, 0.0, 0.25))
_PADDINGS = st.sampled_from((None, 0, 1, -1))
_USUAL_KINDS = (Layer, GatedMLP, Attention)
_KINDS: SearchStrategy[type[AnyLayer]] = st.sampled_from((*_USUAL_KINDS, *_USUAL_KINDS, Experts))
_KINDS_AND_OTHERS: SearchStrategy[type[AnyLayer]] = st.sampled_from((*_USUAL_KINDS, *_USUAL_KINDS, Experts, AnyLayer))
"""`AnyLayer` stands for third-party layers."""
_SCORES = st.sampled_from(ScoreFunction)
_NUM_EXPERTS = st.sampled_from((2, 3, 4, 5, 6, 8))
_BALANCES = st.sampled_from(
    (
        (0.0, False, 0.0),
        (0.1, False, 0.0),
        (0.01, True, 0.0),
        (0.0, False, 0.5),
        (0.0, False, 0.125),
        (0.1, True, 0.5),
        (0.01, False, 0.125),
        (0.0, False, 0.0),
    )
)
"""Load-balancing coefficients, whether the loss is for each sequence, and rates for the router bias.

A single draw gives all three, so later draws stay the same.
"""
_NORMALISERS = st.sampled_from((Normaliser.TOKEN, Normaliser.TOKEN, Normaliser.SEQUENCE))
_SMOOTHINGS = st.sampled_from((0.0, 0.1))
_Z_LOSSES = st.sampled_from((0.0, 0.01))


@st.composite
def attentions(draw: DrawFn, *, length: int = 2) -> Attention:
    """Draw attention. A bias is only drawn if it has an effect: a key bias needs rotary positions and a length above 1."""
    num_kv_heads, width, rotary = draw(_KV_HEADS), draw(_WIDTHS), draw(EVENLY)
    return Attention(
        num_heads=min(num_kv_heads * draw(_GROUPS), 8 // num_kv_heads * num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=width + width % 2 if rotary else width,
        causal=not draw(SOMETIMES),
        rotary=rotary,
        fused=draw(EVENLY),
        bias=draw(SOMETIMES) and rotary and length > 1,
        norm=draw(_NORMS),
        residual=not draw(RARELY),
        dropout=draw(_DROPOUTS),
        frozen=draw(RARELY),
    )


@st.composite
def gated_mlps(draw: DrawFn) -> GatedMLP:
    """Draw gated multi-layer perceptrons."""
    return GatedMLP(
        hidden=draw(_HIDDEN),
        activation=draw(ACTIVATIONS),
        bias=draw(SOMETIMES),
        norm=draw(_NORMS),
        residual=not draw(RARELY),
        dropout=draw(_DROPOUTS),
        frozen=draw(RARELY),
    )


@st.composite
def experts(draw: DrawFn) -> Experts:
    """Draw expert layers. A router chooses one or two experts for each position."""
    top_k = 2 if draw(EVENLY) else 1
    balance, balance_per_sequence, router_bias_rate = draw(_BALANCES)
    return Experts(
        hidden=draw(_HIDDEN),
        num_experts=draw(_NUM_EXPERTS),
        top_k=top_k,
        scores=draw(_SCORES),
        normalised=top_k > 1 and draw(EVENLY),
        weighs_input=draw(SOMETIMES),
        shared=draw(SOMETIMES),
        dispatched=draw(EVENLY),
        balance=balance,
        balance_per_sequence=balance_per_sequence,
        router_bias_rate=router_bias_rate,
        activation=draw(ACTIVATIONS),
        bias=draw(SOMETIMES),
        norm=draw(_NORMS),
        residual=not draw(RARELY),
        dropout=draw(_DROPOUTS),
        frozen=draw(RARELY),
    )


_GATED_MLPS = gated_mlps()
_EXPERTS = experts()


@st.composite
def token_models(draw: DrawFn) -> Model:
    """Draw models with 1 to 5 layers over sequences. One model in four packs several documents into a sequence.

    Most models take tokens, and most such models have a head. One head in three is tied.
    """
    length, features, depth = draw(LENGTHS), draw(_FEATURES), draw(_DEPTHS)
    document_length = draw(_DOCUMENT_LENGTHS)
    if document_length is not None and document_length >= length:
        document_length = None
    of_others = [found for kind in third_party_kinds() if (found := kind.strategy(features)) is not None]
    kinds = _KINDS_AND_OTHERS if of_others else _KINDS
    layers = [_fitted(draw(_layers_of(draw(kinds), length, features, of_others)), features) for _ in range(depth)]
    layers = [_shared(draw, layer, layers[:index]) for index, layer in enumerate(layers)]
    owners = {layer.shares for layer in layers}
    layers = [layer if index in owners else _adapted(layer) for index, layer in enumerate(layers)]
    if all(layer.frozen or layer.shares is not None for layer in layers):
        layers[0] = layers[0].with_fields(frozen=False)
    if draw(RARELY):
        return Model(features=features, length=length, document_length=document_length, layers=tuple(layers))
    vocabulary, padding = draw(VOCABULARIES), draw(_PADDINGS)
    source = Tokens(
        vocabulary=vocabulary,
        padding=None if padding is None else padding % vocabulary,
        learned_positions=draw(EVENLY),
        frozen=draw(RARELY),
    )
    norm = _norm(draw(_NORMS), features)
    head = None if draw(RARELY) else _head(draw, norm)
    return Model(
        features=features,
        source=source,
        length=length,
        document_length=document_length,
        layers=tuple(layers),
        head=head,
        counter=draw(RARELY),
        offset=draw(RARELY),
        scale=draw(SOMETIMES),
    )


def _head(draw: DrawFn, norm: Norm | None) -> Head:
    """Draw a head: one in three is tied, and one in three predicts two tokens."""
    tied, bias, predicts_two = draw(SOMETIMES), draw(SOMETIMES), draw(EVENLY)
    return Head(tied=tied, bias=bias, norm=norm, predicts_two=predicts_two and not tied)


def _layers_of(
    kind: type[AnyLayer], length: int, features: int, of_others: list[SearchStrategy[AnyLayer]]
) -> SearchStrategy[AnyLayer]:
    if kind is AnyLayer:
        return st.one_of(of_others)
    if kind is Attention:
        return attentions(length=length)
    if kind is GatedMLP:
        return _GATED_MLPS
    if kind is Experts:
        return _EXPERTS
    return st.builds(Layer, width=st.just(features), activation=ACTIVATIONS, residual=EVENLY, norm=_NORMS, bias=EVENLY)


def _shared(draw: DrawFn, layer: AnyLayer, before: list[AnyLayer]) -> AnyLayer:
    """Let two in three linear layers share the weight of the first linear layer."""
    owner = next((index for index, other in enumerate(before) if isinstance(other, Layer)), None)
    if not isinstance(layer, Layer) or owner is None or not draw(MOSTLY):
        return layer
    return layer.with_fields(shares=owner)


def _adapted(layer: AnyLayer) -> AnyLayer:
    """Give a frozen weight and a LoRA adapter to some linear layers without bias, norm and shared weight.

    The activation decides and is removed. This takes no choice, so later draws stay the same.
    """
    if not isinstance(layer, Layer) or layer.shares is not None or layer.bias or layer.norm is not None:
        return layer
    adapter = _ADAPTERS.get(layer.activation)
    return layer if adapter is None else replace(adapter, residual=layer.residual)


def _fitted(layer: AnyLayer, features: int) -> AnyLayer:
    return _grouped(layer.with_fields(norm=_norm(layer.norm, features)), features)


def _grouped(layer: AnyLayer, features: int) -> AnyLayer:
    """Let some dispatched experts use `grouped_mm`, with sizes that it accepts.

    The activation decides. This takes no choice, so later draws stay the same.
    """
    if not isinstance(layer, Experts) or not layer.dispatched:
        return layer
    if layer.activation not in _GROUPED or features % _GROUPED_MULTIPLE:
        return layer
    return replace(layer, hidden=-(-layer.hidden // _GROUPED_MULTIPLE) * _GROUPED_MULTIPLE, grouped=True)


def _norm(norm: Norm | None, features: int) -> Norm | None:
    """Return the norm.

    None if its output is constant (one feature, or layer norm over two), because earlier gradients would be rounding errors.
    """
    constant = features == 1 or (features == 2 and norm is Norm.LAYER)
    return None if constant else norm


@st.composite
def cross_entropies(draw: DrawFn) -> CrossEntropy:
    """Draw losses over labels: half ignore some labels, some average over sequences, and some weigh rows or classes."""
    return CrossEntropy(
        ignored=draw(IGNORED),
        per=draw(_NORMALISERS),
        row_weights=draw(RARELY),
        summed=draw(SOMETIMES),
        label_smoothing=draw(_SMOOTHINGS),
        class_weights=draw(RARELY),
        z_loss=draw(_Z_LOSSES),
    )
