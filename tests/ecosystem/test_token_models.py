"""Token models against transformers' Llama of the same sizes and weights: the same loss, and the same gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from equivcheck.scenario import SGD, Attention, CrossEntropy, Data, GatedMLP, Head, IgnoredLabels, Model, Norm, Tokens, Training
from equivcheck.scenario.layers.token_layers import ROTARY_BASE
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import Batch, material

transformers = pytest.importorskip("transformers")

LAYERS = (
    Attention(num_heads=4, num_kv_heads=2, head_dim=4, rotary=True, norm=Norm.RMS),
    GatedMLP(hidden=6, norm=Norm.RMS),
)
MODEL = Model(features=8, source=Tokens(vocabulary=11), length=5, layers=LAYERS * 2, head=Head(norm=Norm.RMS))
NAMES = {
    "norm.weight": ("input_layernorm.weight", "post_attention_layernorm.weight"),
    "query.weight": ("self_attn.q_proj.weight",),
    "key.weight": ("self_attn.k_proj.weight",),
    "value.weight": ("self_attn.v_proj.weight",),
    "output.weight": ("self_attn.o_proj.weight",),
    "gate.weight": ("mlp.gate_proj.weight",),
    "up.weight": ("mlp.up_proj.weight",),
    "down.weight": ("mlp.down_proj.weight",),
}
"""Of a layer's parameter, what Llama calls it; a norm is that of attention or of the perceptron."""
OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.linear.weight": "lm_head.weight",
}


def llama_name(name: str) -> str:
    """What Llama calls a parameter: two of our layers are one of its own."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, index, own = name.split(".", 2)
    choices = NAMES[own]
    return f"model.layers.{int(index) // 2}.{choices[int(index) % 2 if len(choices) > 1 else 0]}"


def llama(training: Training) -> torch.nn.Module:
    """Llama with the initial parameters of a training."""
    model, attention, perceptron = training.model, training.model.layers[0], training.model.layers[1]
    assert isinstance(attention, Attention)
    assert isinstance(perceptron, GatedMLP)
    assert model.source is not None
    configuration = transformers.LlamaConfig(
        vocab_size=model.source.vocabulary,
        hidden_size=model.features,
        intermediate_size=perceptron.hidden,
        num_hidden_layers=len(model.layers) // 2,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rms_norm_eps=float(np.finfo(float).eps),
        tie_word_embeddings=bool(model.head and model.head.tied),
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        attn_implementation="sdpa" if attention.fused else "eager",
        use_cache=False,
    )
    built: torch.nn.Module = transformers.LlamaForCausalLM(configuration).double()
    with torch.no_grad():
        for name, values in material(training).parameters.items():
            built.get_parameter(llama_name(name)).copy_(values)
    return built


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ignored", [IgnoredLabels.NONE, IgnoredLabels.SOME, IgnoredLabels.FIRST_MICROBATCH])
def test_llama_has_the_same_loss_and_gradients(tied: bool, fused: bool, ignored: IgnoredLabels) -> None:
    """Grouped heads, rotary positions, gated perceptrons, a tied head; labels counted over two microbatches."""
    layers = tuple(layer.with_fields(fused=fused) for layer in MODEL.layers)
    model = replace(MODEL, layers=layers, head=Head(norm=Norm.RMS, tied=tied))
    loss = CrossEntropy(ignored=ignored)
    training = Training(model=model, data=Data(microbatches=(3, 2)), loss=loss, optimizer=SGD(), seed=5)
    built = llama(training)
    total = sum(_summed(built, batch) for batch in material(training).steps[0])
    counted = sum(int((batch.targets >= 0).sum()) for batch in material(training).steps[0])
    assert isinstance(total, torch.Tensor)
    (total / counted).backward()  # type: ignore[no-untyped-call]
    step = train(single_device_setup(training)).steps[0]
    assert step.loss == pytest.approx(float(total.detach()) / counted, rel=1e-6)
    start = 0
    for piece in step.gradients.pieces:
        found = step.gradients.values[start : start + piece.numel].reshape(piece.shape)
        start += piece.numel
        expected = built.get_parameter(llama_name(piece.name)).grad
        assert expected is not None
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-7, err_msg=piece.name)


def _summed(built: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a microbatch, in float64 all through: Llama's own turns by angles in float32."""
    logits = built(input_ids=batch.inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
