"""Export a mixture of experts as code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from equivcheck.scenario import Experts, ScoreFunction
from equivcheck.training.layers.script import ACTIVATIONS, LayerScript, norm_line

_CHOSEN = (
    "def chosen_by(scores, count):",
    '    """Whether each score is among the `count` highest; ties go to the lower index."""',
    "    order = torch.sort(scores, stable=True, dim=-1, descending=True)[1][..., :count]",
    "    return (order.unsqueeze(-1) == {experts}).any(-2)",
)
_UNITS = (
    "class Units(nn.Module):",
    '    """Parameters of the experts on this rank."""',
    "",
    "    def forward(self, rows, counts):",
    '        """Compute the local experts on rows sorted by expert; `counts` has the rows per expert."""',
    "        parts = torch.split(rows, counts.tolist()) if len(counts) else ()",
    "        return torch.cat([rows[:0], *(gated(self, part, expert) for expert, part in enumerate(parts))])",
)
_GROUPED_UNITS = (
    *_UNITS[:5],
    "        return grouped(self, rows, counts)",
)
_METHODS = (
    ("def units(self):", '    """Module with the parameters of the experts."""', "    return self.experts"),
    (
        "def compute_units(self, rows, counts):",
        '    """Compute the local experts on rows sorted by expert; `counts` has the rows per expert."""',
        "    return self.experts(rows, counts)",
    ),
)
"""Methods that a layer has only under expert parallelism."""
_EXPERTS = "torch.arange(scores.shape[-1])"


def experts_script(layer: Experts, in_features: int) -> LayerScript:
    """Return the class for a mixture of experts, as code for an exported script."""
    found = LayerScript(
        name="Experts",
        words="Mixture of gated MLPs: a router chooses experts for each position",
        init=tuple(_init(layer, in_features)),
        compute=tuple(_lines(layer)),
        functions=(_chosen(), *_functions(layer)),
        imports=(("torch.nn", "functional"),),
    )
    for_expert_parallel = replace(
        found,
        init=(*_init(layer, in_features, experts="Units()"), f"self.num_units, self.by_units = {layer.num_experts}, None"),
        compute=tuple(_lines(layer, with_shardable_layer=True)),
        functions=(_chosen(), *_functions(layer, has_parts=True), _GROUPED_UNITS if layer.grouped else _UNITS),
        imports=(*found.imports, ("torch.distributed.tensor", "DTensor")),
        methods=_METHODS,
    )
    for_tensor_parallel = replace(
        found,
        init=(
            *found.init,
            *(f"{owner}.region = Region()" for owner in ("self", "self.experts", *["self.shared"] * layer.shared)),
        ),
        compute=tuple(_lines(layer, in_region=True)),
        functions=(_chosen(), *_functions(layer, in_region=True)),
    )
    return replace(found, for_expert_parallel=for_expert_parallel, for_tensor_parallel=for_tensor_parallel)


def _init(layer: Experts, in_features: int, experts: str = "nn.Module()") -> list[str]:
    lines = [*norm_line(layer.norm, in_features), f"self.router = nn.Linear({in_features}, {layer.num_experts}, bias=False)"]
    if layer.router_bias_rate:
        lines.append(f'self.router.register_buffer("expert_bias", torch.zeros({layer.num_experts}))')
        lines.append(f"self.router_bias_rate, self.counts_of_step = {layer.router_bias_rate}, 0.0")
    lines += [f"self.experts = {experts}", *_parameters("experts", layer, in_features, (layer.num_experts,))]
    return [*lines, *(["self.shared = nn.Module()", *_parameters("shared", layer, in_features, ())] if layer.shared else [])]


def _parameters(owner: str, layer: Experts, in_features: int, stacked: tuple[int, ...]) -> list[str]:
    lines = []
    for name, outputs, features in (
        ("gate", layer.hidden, in_features),
        ("up", layer.hidden, in_features),
        ("down", in_features, layer.hidden),
    ):
        sizes = ", ".join(map(str, (*stacked, outputs, features)))
        lines.append(f"self.{owner}.{name} = nn.Parameter(torch.randn({sizes}) / {features} ** 0.5)")
        if layer.bias:
            sizes = ", ".join(map(str, (*stacked, outputs)))
            lines.append(f"self.{owner}.{name}_bias = nn.Parameter(torch.rand({sizes}) - 0.5)")
    return lines


def _chosen() -> tuple[str, ...]:
    return tuple(line.format(experts=_EXPERTS) for line in _CHOSEN)


def _functions(layer: Experts, *, has_parts: bool = False, in_region: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield the functions that compute experts. With `has_parts`, DTensor parameters are made local."""
    if layer.shared or not layer.grouped:
        yield _gated(layer, has_parts=has_parts, in_region=in_region)
    if layer.grouped:
        yield _grouped(layer, has_parts=has_parts, in_region=in_region)


def _grouped(layer: Experts, *, has_parts: bool, in_region: bool) -> tuple[str, ...]:
    """Return a function for all experts on rows sorted by expert."""
    function = ACTIVATIONS.get(layer.activation, ("", ""))[1]
    names = ("gate", "gate_bias", "up", "up_bias", "down", "down_bias") if layer.bias else ("gate", "up", "down")
    own = f"({', '.join(f'owner.{name}' for name in names)})"
    if has_parts:
        own = f"(each.to_local() if isinstance(each, DTensor) else each for each in {own})"
    products = {}
    for name in ("gate", "up", "down"):
        rows = "gated" if name == "down" else "rows"
        bias = f"{name}_bias"
        if name == "down" and in_region:
            bias = f"owner.region.bias_on_first_rank({bias})"
        added = f" + {bias}.repeat_interleave(counts, 0)" if layer.bias else ""
        products[name] = f"functional.grouped_mm({rows}, {name}.transpose(-2, -1), offs=ends){added}"
    return (
        "def grouped(owner, rows, counts):",
        '    """Gated MLPs of all experts on rows sorted by expert; `counts` has the rows per expert."""',
        f"    {', '.join(names)} = {own}",
        "    ends = counts.cumsum(0, dtype=torch.int32)",
        f"    gate = {products['gate']}",
        f"    gated = {f'{function}(gate)' if function else 'gate'} * ({products['up']})",
        f"    return {products['down']}",
    )


def _gated(layer: Experts, *, has_parts: bool = False, in_region: bool = False) -> tuple[str, ...]:
    """Return a function for one expert, or for one of several experts by index.

    With `has_parts`, DTensor parameters are made local.
    """
    function = ACTIVATIONS.get(layer.activation, ("", ""))[1]
    names = ("gate", "gate_bias", "up", "up_bias", "down", "down_bias") if layer.bias else ("gate", "up", "down")
    own = f"({', '.join(f'owner.{name}' for name in names)})"
    parts = [f"    own = [each.to_local() if isinstance(each, DTensor) else each for each in {own}]"] if has_parts else []
    linears = {name: f"{name}, {name}_bias" if layer.bias else name for name in ("gate", "up", "down")}
    if layer.bias and in_region:
        linears["down"] = "down, owner.region.bias_on_first_rank(down_bias)"
    gate = f"functional.linear(values, {linears['gate']})"
    return (
        "def gated(owner, values, expert=None):",
        '    """Gated MLP: down(activation(gate(values)) * up(values))."""',
        *parts,
        f"    {', '.join(names)} = (each if expert is None else each[expert] for each in {'own' if has_parts else own})",
        f"    gated = {f'{function}({gate})' if function else gate} * functional.linear(values, {linears['up']})",
        f"    return functional.linear(gated, {linears['down']})",
    )


def _lines(layer: Experts, *, with_shardable_layer: bool = False, in_region: bool = False) -> list[str]:
    normed = "self.norm(inputs)" if layer.norm else "inputs"
    lines = [f"normed = {f'self.region.gather_input({normed})' if in_region else normed}"]
    lines.append(f"scores = self.router(normed).{'softmax(-1)' if layer.scores is ScoreFunction.SOFTMAX else 'sigmoid()'}")
    bias = " + self.router.expert_bias" if layer.router_bias_rate else ""
    lines.append(f"chosen = chosen_by(scores.detach(){bias}, {layer.top_k})")
    lines += _load(layer) if layer.balance else []
    lines += ["self.counts = chosen.float().flatten(0, -2).sum(0)"] * bool(layer.router_bias_rate)
    lines.append("weights = scores * chosen")
    lines += ["weights = weights / weights.sum(-1, keepdim=True)"] * layer.normalised
    lines += ["normed, weights = self.region.copy_to_ranks(normed, weights)"] * in_region
    if with_shardable_layer:
        lines += _by_units(layer, "(self.by_units or self.compute_units)(")
    elif layer.grouped:
        lines += _by_units(layer, "grouped(self.experts, ")
    else:
        lines += _dispatched(layer) if layer.dispatched else _routed(layer)
    lines += ["values = values + gated(self.shared, normed)"] * layer.shared
    return lines + ["values = self.region.reduce_output(values)"] * in_region


def _load(layer: Experts) -> list[str]:
    """Return lines that record the load for the load-balancing loss: selections and score shares, summed over positions.

    For a loss of each sequence, they are summed over each row's positions.
    """
    shares = "scores" if layer.scores is ScoreFunction.SOFTMAX else "(scores / scores.sum(-1, keepdim=True))"
    if layer.balance_per_sequence:
        within = "unsqueeze(1).flatten(1, -2).sum(1)"
        return [f"self.load = {layer.balance}, chosen.to(scores.dtype).{within}, {shares}.{within}  # for each sequence"]
    counts = "chosen.to(scores.dtype).sum(positions)"
    return ["positions = tuple(range(scores.ndim - 1))", f"self.load = {layer.balance}, {counts}, {shares}.sum(positions)"]


def _weighted(layer: Experts, values: str, weight: str) -> str:
    if layer.weighs_input:
        return f"gated(self.experts, {values} * {weight}, expert)"
    return f"gated(self.experts, {values}, expert) * {weight}"


def _routed(layer: Experts) -> list[str]:
    made = _weighted(layer, "normed", "weights[..., expert : expert + 1]")
    return [
        "values = torch.zeros_like(normed)",
        f"for expert in range({layer.num_experts}):",
        f"    values = values + {made} * chosen[..., expert : expert + 1]",
    ]


def _dispatched(layer: Experts) -> list[str]:
    return [
        "flat, chosen, weights = (each.flatten(0, -2) for each in (normed, chosen, weights))",
        "values = torch.zeros_like(flat)",
        f"for expert in range({layer.num_experts}):",
        "    places = chosen[:, expert].nonzero().squeeze(-1)",
        f"    made = {_weighted(layer, 'flat[places]', 'weights[places, expert, None]')}",
        "    values = values.index_add(0, places, made)",
        "values = values.view(normed.shape)",
    ]


def _by_units(layer: Experts, call: str) -> list[str]:
    return [
        "flat, chosen, weights = (each.flatten(0, -2) for each in (normed, chosen, weights))",
        "experts, places = chosen.T.nonzero(as_tuple=True)",
        "weight, rows = weights[places, experts, None], flat[places]",
        f"made = {call}{'rows * weight' if layer.weighs_input else 'rows'}, chosen.sum(0))",
        f"values = torch.zeros_like(flat).index_add(0, places, {'made' if layer.weighs_input else 'made * weight'})",
        "values = values.view(normed.shape)",
    ]
