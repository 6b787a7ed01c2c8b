"""Token models in plain NumPy: the forward, position by position and head by head; gradients are differences of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from equivcheck.scenario import Activation, AnyLayer, Attention, Experts, GatedMLP, Layer, LoRALinear, Model, Norm, ScoreFunction

Array = npt.NDArray[np.float64]
Parameters = Mapping[str, Array]


def sigmoid(values: Array) -> Array:
    """The logistic function."""
    return 1.0 / (1.0 + np.exp(-values))


def normal_below(values: Array) -> Array:
    """The share of a normal distribution that is below."""
    return 0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(values / math.sqrt(2.0)))


def softmax(values: Array) -> Array:
    """Exponentials as shares."""
    powers = np.exp(values - values.max())
    return np.asarray(powers / powers.sum())


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    Activation.IDENTITY: lambda x: x,
    Activation.RELU: lambda x: np.maximum(x, 0.0),
    Activation.GELU: lambda x: x * normal_below(x),
    Activation.TANH: np.tanh,
    Activation.SIGMOID: sigmoid,
    Activation.SILU: lambda x: x * sigmoid(x),
}
BASE = 100.0


def logits(model: Model, parameters: Parameters, inputs: npt.NDArray[np.int64] | Array) -> Array:
    """Outputs of shape (rows, length, outputs), or (rows, length, 2, outputs) for two predictions."""
    return _through(model, parameters, inputs)[0]


def balance_loss(model: Model, parameters: Parameters, inputs: npt.NDArray[np.int64] | Array) -> float:
    """The auxiliary losses of experts in a microbatch."""
    layers = zip(model.layers, _through(model, parameters, inputs)[1], strict=True)
    return sum(_balance_loss(layer, _own(parameters, index), values) for index, (layer, values) in enumerate(layers))


def _through(model: Model, parameters: Parameters, inputs: npt.NDArray[np.int64] | Array) -> tuple[Array, list[Array]]:
    """Outputs, and what enters each layer."""
    entering = []
    values = np.asarray(inputs, dtype=float)
    if model.source is not None:
        values = parameters["embedding.weight"][inputs]
        if model.source.learned_positions:
            places = [position % (model.document_length or model.length) for position in range(values.shape[1])]
            values = values + parameters["positions.weight"][places][None]
    for index, layer in enumerate(model.layers):
        own = _own(parameters, index)
        entering.append(values)
        if isinstance(layer, Layer) and layer.shares is not None:
            own["linear.weight"] = parameters[f"layers.{layer.shares}.linear.weight"]
        values = np.stack([_layer(layer, own, row, model.document_length or len(row)) for row in values])
    if model.head is not None:
        own = {name.removeprefix("head."): each for name, each in parameters.items() if name.startswith("head.")}
        own.setdefault("linear.weight", parameters["embedding.weight"])
        values = _linear(own, "linear", _norm(model.head.norm, own, values))
        values = values.reshape(*values.shape[:-1], *model.output_shape)
    values = values * parameters.get("scale", 1.0)
    return values + np.linspace(0.25, 0.75, model.out_features) if model.offset else values, entering


def _own(parameters: Parameters, index: int) -> dict[str, Array]:
    """The parameters of a layer, by their names in it."""
    start = f"layers.{index}."
    return {name.removeprefix(start): each for name, each in parameters.items() if name.startswith(start)}


def _layer(layer: AnyLayer, own: Parameters, inputs: Array, document_length: int) -> Array:
    """One row, of shape (length, features)."""
    normed = _norm(layer.norm, own, inputs)
    if isinstance(layer, Attention):
        outputs = _linear(own, "output", _attended(layer, own, normed, document_length))
    elif isinstance(layer, Experts):
        outputs = np.stack([_routed(layer, own, position) for position in normed])
    elif isinstance(layer, GatedMLP):
        gate = ACTIVATIONS[layer.activation](_linear(own, "gate", normed))
        outputs = _linear(own, "down", gate * _linear(own, "up", normed))
    elif isinstance(layer, LoRALinear):
        adapted = _linear(own, "lora_b", _linear(own, "lora_a", normed))
        outputs = _linear(own, "base", normed) + layer.alpha / layer.rank * adapted
    else:
        assert isinstance(layer, Layer), layer
        outputs = ACTIVATIONS[layer.activation](_linear(own, "linear", normed))
    return outputs + inputs if layer.residual else outputs


def _attended(layer: Attention, own: Parameters, normed: Array, document_length: int) -> Array:
    """Concatenated heads, document by document."""
    documents = range(0, len(normed), document_length)
    return np.concatenate([_attended_within(layer, own, normed[start : start + document_length]) for start in documents])


def _attended_within(layer: Attention, own: Parameters, normed: Array) -> Array:
    """Heads beside each other, position by position."""
    query, key, value = (_linear(own, name, normed) for name in ("query", "key", "value"))
    width, length = layer.head_dim, len(normed)
    attended = np.zeros((length, layer.num_heads * width))
    for head in range(layer.num_heads):
        shared = head // (layer.num_heads // layer.num_kv_heads)
        mine, others = slice(head * width, (head + 1) * width), slice(shared * width, (shared + 1) * width)
        for position in range(length):
            seen = range(position + 1 if layer.causal else length)
            asked = _turned(layer, query[position, mine], position)
            scores = np.array([asked @ _turned(layer, key[other, others], other) for other in seen]) / np.sqrt(width)
            attended[position, mine] = softmax(scores) @ value[list(seen), others]
    return attended


def _balance_loss(layer: AnyLayer, own: Parameters, inputs: Array) -> float:
    """By each expert's share of all choices, and the mean of its share of the scores of a position."""
    if not isinstance(layer, Experts) or not layer.balance:
        return 0.0
    rows = [[_route(layer, own, position) for position in row] for row in _norm(layer.norm, own, inputs)]
    if layer.balance_per_sequence:
        return float(np.mean([_balance_of(layer, row) for row in rows]))
    return _balance_of(layer, [route for row in rows for route in row])


def _balance_of(layer: Experts, routes: list[tuple[Array, list[int]]]) -> float:
    """The loss of some positions, by their scores and choices."""
    choices = [expert for _, chosen in routes for expert in chosen]
    shares = [np.mean([scores[expert] / sum(scores) for scores, _ in routes]) for expert in range(layer.num_experts)]
    found = sum(choices.count(expert) / len(choices) * share for expert, share in enumerate(shares))
    return float(layer.balance * layer.num_experts * found)


def choice_counts(model: Model, parameters: Parameters, inputs: npt.NDArray[np.int64] | Array) -> list[Array]:
    """How many positions choose each expert, for each layer of a model that has only experts. Biases are among `parameters`."""
    counts = []
    for index, (layer, values) in enumerate(zip(model.layers, _through(model, parameters, inputs)[1], strict=True)):
        assert isinstance(layer, Experts), layer
        own = _own(parameters, index)
        routes = [_route(layer, own, position)[1] for row in _norm(layer.norm, own, values) for position in row]
        counts.append(np.bincount([expert for chosen in routes for expert in chosen], minlength=layer.num_experts).astype(float))
    return counts


def _route(layer: Experts, own: Parameters, values: Array) -> tuple[Array, list[int]]:
    """The scores of one position, and the experts that it chooses."""
    scored = own["router.weight"] @ values
    scores = softmax(scored) if layer.scores is ScoreFunction.SOFTMAX else sigmoid(scored)
    biased = scores + own.get("router.expert_bias", 0.0)
    return scores, sorted(range(layer.num_experts), key=lambda expert: (-biased[expert], expert))[: layer.top_k]


def _routed(layer: Experts, own: Parameters, values: Array) -> Array:
    """One position through the experts that it chooses, of shape (features,)."""
    scores, chosen = _route(layer, own, values)
    total = sum(scores[expert] for expert in chosen) if layer.normalised else 1.0
    outputs = _expert(layer, _of_expert(own, "shared"), values) if layer.shared else np.zeros_like(values)
    for expert in chosen:
        weight, theirs = scores[expert] / total, {name: each[expert] for name, each in _of_expert(own, "experts").items()}
        before, after = (weight, 1.0) if layer.weighs_input else (1.0, weight)
        outputs = outputs + after * _expert(layer, theirs, before * values)
    return outputs


def _of_expert(own: Parameters, owner: str) -> Parameters:
    return {name.removeprefix(f"{owner}."): each for name, each in own.items() if name.startswith(f"{owner}.")}


def _expert(layer: Experts, own: Parameters, values: Array) -> Array:
    gate, up = (own[name] @ values + own.get(f"{name}_bias", 0.0) for name in ("gate", "up"))
    return np.asarray(own["down"] @ (ACTIVATIONS[layer.activation](gate) * up) + own.get("down_bias", 0.0))


def _turned(layer: Attention, values: Array, position: int) -> Array:
    """Pairs of features as complex numbers, turned by the position."""
    if not layer.rotary:
        return values
    half = layer.head_dim // 2
    turned = (values[:half] + 1j * values[half:]) * np.exp(1j * position * BASE ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])


def _linear(own: Parameters, name: str, values: Array) -> Array:
    return values @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)


def _norm(norm: Norm | None, own: Parameters, values: Array) -> Array:
    if norm is None:
        return values
    if norm is Norm.LAYER:
        spread = np.sqrt(values.var(-1, keepdims=True) + 1e-5)
        return (values - values.mean(-1, keepdims=True)) / spread * own["norm.weight"] + own["norm.bias"]
    size = np.sqrt(np.square(values).mean(-1, keepdims=True) + np.finfo(float).eps)
    return values / size * own["norm.weight"]
