"""Module for a mixture of experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from equivcheck.scenario import Experts, ScoreFunction
from equivcheck.training.layers.module import (
    ACTIVATIONS,
    RoutedModule,
    RoutingLoad,
    UninitializedLinear,
    local_like,
    norm_of,
    replicated_like,
)
from equivcheck.training.layers.region import UNSHARDED, Region

Own = dict[str, tuple[torch.Tensor, torch.Tensor | None]]
"""Weight and bias for each linear, for one expert or for this rank's experts."""


Selection = int | torch.Tensor | None
"""One expert by index, or all experts by their numbers of rows. None for a module with one expert."""


class Router(UninitializedLinear):
    """Linear router: for each position, selects experts and computes their weights.

    If the router has a bias, `counts` says how many positions chose each expert in the last forward. `counts_of_step` adds up
    these numbers over the step.
    """

    expert_bias: torch.Tensor

    def __init__(self, layer: Experts, in_features: int) -> None:
        super().__init__(in_features, layer.num_experts, bias=False)
        self.layer = layer
        self.load: RoutingLoad | None = None
        self.counts: torch.Tensor | None = None
        self.counts_of_step: torch.Tensor | None = None
        if layer.router_bias_rate:
            self.register_buffer("expert_bias", torch.zeros(layer.num_experts, dtype=torch.float32))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return a mask with True for each selected expert, and all experts' weights.

        The weight is 0 for an expert that is not selected. Both tensors have shape (..., experts). `inputs` have shape (...,
        features).
        """
        logits = super().forward(inputs)
        scores = logits.softmax(-1) if self.layer.scores is ScoreFunction.SOFTMAX else logits.sigmoid()
        chosen = self.select(scores)
        weights = scores * chosen
        return chosen, weights / weights.sum(-1, keepdim=True) if self.layer.normalised else weights

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """Return a mask with True for each selected expert, and store the routing statistics in the router.

        The mask has the shape of `scores`: (..., experts).
        """
        chosen = self.chosen(self.add_bias(scores.detach()))
        if self.layer.balance:
            self.load = self.load_of(scores, chosen)
        if self.layer.router_bias_rate:
            self.counts = _sum_over_positions(chosen.to(torch.float32))
        return chosen

    def add_bias(self, scores: torch.Tensor) -> torch.Tensor:
        """Add the bias to the scores (..., experts), if the layer has one."""
        return scores + replicated_like(scores, self.expert_bias) if self.layer.router_bias_rate else scores

    def load_of(self, scores: torch.Tensor, chosen: torch.Tensor) -> RoutingLoad:
        """Return the routing statistics for the load-balancing loss. `scores` and `chosen` have shape (..., experts)."""
        shares = scores if self.layer.scores is ScoreFunction.SOFTMAX else scores / scores.sum(-1, keepdim=True)
        add = _sum_within_rows if self.layer.balance_per_sequence else _sum_over_positions
        return RoutingLoad(self.layer.balance, add(chosen.to(scores.dtype)), add(shares))

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Return whether each score is among the `top_k` highest at its position. The shape is (..., experts).

        Scores are sorted stably to break ties, because `topk` may pick any of equal scores.
        """
        order = torch.sort(scores, stable=True, dim=-1, descending=True)[1][..., : self.layer.top_k]
        experts = replicated_like(scores, torch.arange(self.layer.num_experts, device=scores.device))
        return (order.unsqueeze(-1) == experts).any(-2)


def _sum_over_positions(values: torch.Tensor) -> torch.Tensor:
    """Sum values (..., experts) over all dims except the last."""
    return values.sum(tuple(range(values.ndim - 1)))


def _sum_within_rows(values: torch.Tensor) -> torch.Tensor:
    """Sum values (rows, ..., experts) over the dims between rows and experts."""
    dims = tuple(range(1, values.ndim - 1))
    return values.sum(dims) if dims else values


class GatedExperts(nn.Module):
    """One gated MLP, or several with parameters stacked along dim 0.

    If `grouped` is set, `grouped_mm` multiplies the rows of all experts at once.
    """

    def __init__(self, layer: Experts, in_features: int, *stacked: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS.get(layer.activation)
        self.region: Region = UNSHARDED
        self.grouped = False
        for name, outputs, features in (
            ("gate", layer.hidden, in_features),
            ("up", layer.hidden, in_features),
            ("down", in_features, layer.hidden),
        ):
            self.register_parameter(name, nn.Parameter(torch.empty(*stacked, outputs, features)))
            bias = nn.Parameter(torch.empty(*stacked, outputs)) if layer.bias else None
            self.register_parameter(f"{name}_bias", bias)

    def forward(self, inputs: torch.Tensor, expert: int | None = None, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one expert on inputs (..., features). `expert` is its index if parameters of several experts are stacked.

        If `counts` is given, all experts are computed: the inputs are rows sorted by expert, and `counts` says how many rows each
        expert gets.
        """
        own = self._parameters_beside(inputs)
        if counts is None:
            return self._computed(own, inputs, expert)
        if self.grouped:
            return self._computed(own, inputs, counts)
        parts = torch.split(inputs, counts.tolist()) if len(counts) else ()
        return torch.cat([inputs[:0], *(self._computed(own, part, number) for number, part in enumerate(parts))])

    def _parameters_beside(self, inputs: torch.Tensor) -> Own:
        """Return weight and bias for each linear, local if the inputs are plain tensors.

        Parallelisms may replace parameters by plain tensors.
        """
        names = ((name, getattr(self, name), getattr(self, f"{name}_bias")) for name in ("gate", "up", "down"))
        return {
            name: (local_like(inputs, weight), None if bias is None else local_like(inputs, bias)) for name, weight, bias in names
        }

    def _computed(self, own: Own, inputs: torch.Tensor, expert: Selection) -> torch.Tensor:
        gate = _linear(own["gate"], inputs, expert)
        if self.activation is not None:
            gate = self.activation(gate)
        values, (weight, bias) = gate * _linear(own["up"], inputs, expert), own["down"]
        if bias is None or self.region is UNSHARDED:
            return _linear((weight, bias), values, expert)
        # Added last, so that backward has its gradient first, as that of every bias.
        addend = _linear((weight, None), values, expert)
        return addend + self.region.bias_on_first_rank(_bias_of(bias, expert))


def _linear(of: tuple[torch.Tensor, torch.Tensor | None], inputs: torch.Tensor, expert: Selection) -> torch.Tensor:
    weight, bias = of
    if isinstance(expert, torch.Tensor):
        product = functional.grouped_mm(inputs, weight.transpose(-2, -1), offs=ends_of_groups(expert))
        # `grouped_mm` has a parameter for a bias, but no version accepts one.
        return product if bias is None else product + _bias_of(bias, expert)
    if expert is not None:
        weight, bias = weight[expert], None if bias is None else bias[expert]
    return functional.linear(inputs, weight, bias)


def ends_of_groups(counts: torch.Tensor) -> torch.Tensor:
    """Return the row after each expert's last row, in the dtype that `grouped_mm` requires. `counts` has the rows per expert."""
    return counts.cumsum(0, dtype=torch.int32)


def _bias_of(bias: torch.Tensor, expert: Selection) -> torch.Tensor:
    if expert is None:
        return bias
    return bias.repeat_interleave(expert, 0) if isinstance(expert, torch.Tensor) else bias[expert]


class ExpertsModule(RoutedModule):
    """Mixture of experts: router, routed experts and an optional shared expert."""

    layer: Experts

    def __init__(self, layer: Experts, in_features: int) -> None:
        super().__init__(layer)
        self.norm = norm_of(layer.norm, in_features)
        self.router = Router(layer, in_features)
        self.experts = GatedExperts(layer, in_features, layer.num_experts)
        self.shared = GatedExperts(layer, in_features) if layer.shared else None
        self.num_units = layer.num_experts

    def use_rank_implementation(self) -> None:
        """Compute experts by `grouped_mm` if the layer asks for it."""
        self.experts.grouped = self.layer.grouped

    def chooser(self) -> Router:
        """Return this layer's router."""
        return self.router

    def load(self) -> RoutingLoad | None:
        """Return the router's statistics from the last forward, for the load-balancing loss."""
        return self.router.load

    def units(self) -> GatedExperts:
        """Return the module with the routed experts' parameters."""
        return self.experts

    def compute(self, inputs: torch.Tensor, mask: torch.Tensor | None, step: int) -> torch.Tensor:  # noqa: ARG002 - of the base
        """Compute the layer. Output and input have the same shape: (rows, features) or (rows, length, features)."""
        normed = self.region.gather_input(inputs if self.norm is None else self.norm(inputs))
        chosen, weights = self.router(normed)
        normed, weights = self.region.copy_to_ranks(normed, weights)
        sends = self.layer.dispatched or self.by_units is not None
        outputs = (self.dispatched if sends else self.routed)(normed, chosen, weights)
        if self.shared is not None:
            outputs = outputs + self.shared(normed)
        return self.finish(self.region.reduce_output(outputs), mask, inputs)

    def routed(self, values: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute every expert on every position, and add up the selected experts' outputs.

        `values` have shape (..., features).
        """
        outputs = torch.zeros_like(values)
        for expert in range(self.layer.num_experts):
            counts, weight = chosen[..., expert : expert + 1], weights[..., expert : expert + 1]
            outputs = outputs + (self.weighted(values, weight, expert) * counts)
        return outputs

    def dispatched(self, values: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute each expert only on the positions routed to it. `values` has shape (..., features)."""
        flat, chosen, weights = (each.flatten(0, -2) for each in (values, chosen, weights))
        experts, places = chosen.T.nonzero(as_tuple=True)
        weight, rows = weights[places, experts, None], flat[places]
        if self.layer.weighs_input:
            rows = rows * weight
        made = (self.by_units or self.compute_units)(rows, chosen.sum(0))
        if not self.layer.weighs_input:
            made = made * weight
        return torch.zeros_like(flat).index_add(0, places, made).view(values.shape)

    def compute_units(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute this rank's experts on rows sorted by expert. `counts` says how many rows each expert gets."""
        made: torch.Tensor = self.experts(rows, counts=counts)
        return made

    def weighted(self, values: torch.Tensor, weight: torch.Tensor, expert: int) -> torch.Tensor:
        """Compute one expert, and multiply its output by the router weights.

        If the layer weighs inputs, the expert's input is multiplied instead. `values` have shape (..., features), and `weight`
        has shape (..., 1).
        """
        made: torch.Tensor = self.experts(values * weight if self.layer.weighs_input else values, expert)
        return made if self.layer.weighs_input else made * weight
