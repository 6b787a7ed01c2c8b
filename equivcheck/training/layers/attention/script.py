"""Export self-attention as code."""

from __future__ import annotations

from equivcheck.scenario import Attention
from equivcheck.scenario.layers.token_layers import ROTARY_BASE
from equivcheck.training.layers.facts import LayerParameter
from equivcheck.training.layers.script import LayerScript, linear_lines, norm_line

_TURNED = (
    "def turned(values):",
    '    """Apply rotary embeddings: rotate feature pairs, half a head apart, by their position."""',
    "    length, half = values.shape[-2], values.shape[-1] // 2",
    f"    rates = {ROTARY_BASE} ** (-torch.arange(half, dtype=torch.float64) / half)",
    "    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates).to(values.dtype)",
    "    cosine, sine = angles.cos(), angles.sin()",
    "    first, second = values[..., :half], values[..., half:]",
    "    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)",
)


_TURNED_WITHIN = (
    *_TURNED[:4],
    "    places = torch.arange(length, dtype=torch.float64) % DOCUMENT_LENGTH",
    "    angles = torch.outer(places, rates).to(values.dtype)",
    *_TURNED[5:],
)
_TURNED_BY = (
    "def turned(values, positions):",
    *_TURNED[1:2],
    "    half = values.shape[-1] // 2",
    *_TURNED[3:4],
    "    angles = torch.outer(positions.to(torch.float64), rates).to(values.dtype)",
    *_TURNED[5:],
)
_WITHIN = " % DOCUMENT_LENGTH"
_OTHERS = "queries[:, None] // DOCUMENT_LENGTH != keys // DOCUMENT_LENGTH"
_ENDED = "values = self.output(attended.transpose(-2, -3).flatten(-2))"


def attention_script(
    layer: Attention, in_features: int, parameters: tuple[LayerParameter, ...], *, packed: bool = False
) -> LayerScript:
    """Return the code for an attention layer's class in an exported script.

    With `packed`, sequences contain several documents.
    """
    lines = _linears(layer)
    lines += ["query, key = turned(query), turned(key)"] * layer.rotary
    groups = layer.num_heads // layer.num_kv_heads
    lines += [f"{name} = {name}.repeat_interleave({groups}, -3)" for name in ("key", "value") if groups > 1]
    lines += _packed(layer) if packed else _fused(layer) if layer.fused else _explicit(layer)
    lines.append(_ENDED)
    return LayerScript(
        name="Attention",
        words="Self-attention over positions",
        init=(*norm_line(layer.norm, in_features), *linear_lines(parameters)),
        compute=tuple(lines),
        functions=(_TURNED_WITHIN if packed else _TURNED,) if layer.rotary else (),
        imports=(("torch.nn", "functional"),) if layer.fused else (),
        for_packed_documents=None if packed else attention_script(layer, in_features, parameters, packed=True),
        for_context_parallel=_script_of_parts(layer, in_features, parameters, packed=packed),
    )


def _linears(layer: Attention) -> list[str]:
    lines = [f"normed = {'self.norm(inputs)' if layer.norm else 'inputs'}"]
    # How many heads there are follows from the values: a rank may have some of them.
    return lines + [
        f"{name} = self.{name}(normed).unflatten(-1, (-1, {layer.head_dim})).transpose(-2, -3)"
        for name in ("query", "key", "value")
    ]


def _script_of_parts(layer: Attention, in_features: int, parameters: tuple[LayerParameter, ...], *, packed: bool) -> LayerScript:
    placed = f"positions = self.sequence.positions(query.shape[-2], query.device){_WITHIN * packed}"
    return LayerScript(
        name="Attention",
        words="Self-attention over positions, some of which may be on other ranks",
        init=(*norm_line(layer.norm, in_features), *linear_lines(parameters), "self.sequence = Sequence()"),
        compute=(
            *_linears(layer),
            *(placed, "query, key = turned(query, positions), turned(key, positions)") * layer.rotary,
            "attended = self.sequence.attend_from_local(self, query, key, value)",
            _ENDED,
        ),
        functions=(_TURNED_BY,) if layer.rotary else (),
        imports=(("torch.nn", "functional"),) if layer.fused else (),
        methods=_methods(layer, packed=packed),
    )


def _methods(layer: Attention, *, packed: bool) -> tuple[tuple[str, ...], ...]:
    """Return methods for context parallelism, with the names in `AttentionModule`."""
    groups = layer.num_heads // layer.num_kv_heads
    if layer.fused:
        mask = "attn_mask = None if unseen is None else ~unseen"
        found = [mask, "return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)"]
    else:
        found = [f"scores = query @ key.transpose(-1, -2) / {layer.head_dim} ** 0.5"]
        found += ["scores = scores if unseen is None else scores.masked_fill(unseen, -torch.inf)"]
        found += ["return scores.softmax(-1) @ value"]
    whole = ["positions = torch.arange(query.shape[-2])"]
    whole += ["return self.attend_from(query, key, value, self.unseen(positions, positions))"]
    return tuple(
        (f"def {head}:", *(f"    {line}" for line in lines))
        for head, lines in (
            (
                "repeat_kv_heads(self, values)",
                [f"return values.repeat_interleave({groups}, -3)" if groups > 1 else "return values"],
            ),
            ("unseen(self, queries, keys)", [f"return {_unseen(layer, packed=packed)}"]),
            ("attend(self, query, key, value)", whole),
            ("attend_from(self, query, key, value, unseen)", found),
        )
    )


def _unseen(layer: Attention, *, packed: bool) -> str:
    """Mask, (queries, keys), with True if a query may not attend to a key."""
    later = "keys > queries[:, None]" if layer.causal else ""
    if not packed:
        return later or "None"
    return f"({later}) | ({_OTHERS})" if later else _OTHERS


def _packed(layer: Attention) -> list[str]:
    lines = ["queries = keys = torch.arange(query.shape[-2])", f"unseen = {_unseen(layer, packed=True)}"]
    if layer.fused:
        return [*lines, "attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=~unseen)"]
    lines.append(f"scores = query @ key.transpose(-1, -2) / {layer.head_dim} ** 0.5")
    return [*lines, "attended = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ value"]


def _fused(layer: Attention) -> list[str]:
    causal = ", is_causal=True" * layer.causal
    return [f"attended = functional.scaled_dot_product_attention(query, key, value{causal})"]


def _explicit(layer: Attention) -> list[str]:
    lines = [f"scores = query @ key.transpose(-1, -2) / {layer.head_dim} ** 0.5"]
    if layer.causal:
        lines.append("later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)")
        lines.append("scores = scores.masked_fill(later, -torch.inf)")
    return [*lines, "attended = scores.softmax(-1) @ value"]
