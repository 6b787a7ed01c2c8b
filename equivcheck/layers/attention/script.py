"""Self-attention as exported scripts write it."""

from __future__ import annotations

from equivcheck.layers.attention.rotary import ROTARY_BASE
from equivcheck.layers.facts import ParameterOf
from equivcheck.layers.script import LayerScript, linear_lines, norm_line
from equivcheck.scenario import Attention

_TURNED = (
    "def turned(values):",
    '    """Turn pairs of features of each head, half a head apart, by their position."""',
    "    length, half = values.shape[-2], values.shape[-1] // 2",
    f"    rates = {ROTARY_BASE} ** (-torch.arange(half, dtype=torch.float64) / half)",
    "    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates).to(values.dtype)",
    "    cosine, sine = angles.cos(), angles.sin()",
    "    first, second = values[..., :half], values[..., half:]",
    "    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)",
)


def attention_script(layer: Attention, inputs: int, parameters: tuple[ParameterOf, ...]) -> LayerScript:
    """The class, for so many input features."""
    lines = [f"normed = {'self.norm(inputs)' if layer.norm else 'inputs'}"]
    lines += [
        # How many heads there are follows from the values: a rank may have some of them.
        f"{name} = self.{name}(normed).unflatten(-1, (-1, {layer.head_width})).transpose(-2, -3)"
        for name in ("query", "key", "value")
    ]
    lines += ["query, key = turned(query), turned(key)"] * layer.rotary
    groups = layer.heads // layer.kv_heads
    lines += [f"{name} = {name}.repeat_interleave({groups}, -3)" for name in ("key", "value") if groups > 1]
    lines += _fused(layer) if layer.fused else _explicit(layer)
    lines.append("values = self.output(attended.transpose(-2, -3).flatten(-2))")
    return LayerScript(
        name="Attention",
        words="Self-attention over positions",
        init=(*norm_line(layer.norm, inputs), *linear_lines(parameters)),
        compute=tuple(lines),
        functions=(_TURNED,) if layer.rotary else (),
        imports=(("torch.nn", "functional"),) if layer.fused else (),
    )


def _fused(layer: Attention) -> list[str]:
    causal = ", is_causal=True" * layer.causal
    return [f"attended = functional.scaled_dot_product_attention(query, key, value{causal})"]


def _explicit(layer: Attention) -> list[str]:
    lines = [f"scores = query @ key.transpose(-1, -2) / {layer.head_width} ** 0.5"]
    if layer.causal:
        lines.append("later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)")
        lines.append("scores = scores.masked_fill(later, -torch.inf)")
    return [*lines, "attended = scores.softmax(-1) @ value"]
