"""Mixture-of-experts layer: a router selects experts for each position."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from equivcheck.scenario.layers.base import Activation, AnyLayer, Norm
from equivcheck.scenario.layers.token_layers import MAX_DROPOUT, MAX_HIDDEN, GatedMLP
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between
from equivcheck.system.choice import PrintableEnum

MAX_EXPERTS = 32
"""Maximum experts. Generated scenarios usually have fewer, but ranks may require a larger multiple."""
MAX_CHOSEN = 2
MAX_BALANCE = 1.0
MAX_ROUTER_BIAS_RATE = 1.0


class ScoreFunction(PrintableEnum):
    """Function that turns router logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@frozen_dataclass
class Experts(AnyLayer):
    """Mixture of gated MLPs: a router selects `top_k` experts for each position by score.

    ``residual(dropout(sum(weight * expert(norm(x)) for selected experts) + shared(norm(x))))``. On equal scores, the expert with
    the lower index wins. All experts' weights for one projection are stacked along dim 0 of one parameter. An expert that no
    position selects therefore has a zero gradient, never None, on one device and on every rank.
    """

    tag: ClassVar[str] = "experts"
    hidden: int
    """Hidden features in each expert, 1 to 32."""
    num_experts: int = 2
    """Experts that the router chooses from, 2 to 32, without the shared expert."""
    top_k: int = 1
    """Experts selected for each position, 1 or 2."""
    scores: ScoreFunction = ScoreFunction.SOFTMAX
    """Function that turns router logits into scores. A selected expert's score is its weight."""
    normalised: bool = False
    """Whether the weights are divided by their sum over the selected experts. Only with `top_k=2`."""
    weighs_input: bool = False
    """Whether weights multiply the input to an expert instead of its output."""
    shared: bool = False
    """Whether an additional expert, which the router does not choose, computes every position. Its output is added without a
    weight.
    """
    dispatched: bool = False
    """Whether each expert computes only the positions routed to it.
    Otherwise each expert computes all positions, and results for other positions are masked out."""
    grouped: bool = False
    """Whether ranks multiply the rows of all experts in one `torch.nn.functional.grouped_mm` for each projection.

    The single-device run computes one expert after the other, unless the layout rounds to lower precision: then it uses the same
    operation, to round at the same places. Only with `dispatched`."""
    balance: float = 0.0
    """Coefficient for a load-balancing loss, 0 to 1; 0 disables it.

    The loss is ``balance * num_experts * sum(f * P)`` over experts (https://arxiv.org/abs/2101.03961, equation 4). ``f`` is an
    expert's fraction of all assignments in a microbatch, without gradient. ``P`` is the expert's mean share in the scores over
    all positions. The term is averaged over rows even if the main loss is a sum, and each microbatch is weighted by its fraction
    of the step's rows."""
    balance_per_sequence: bool = False
    """Whether the load-balancing loss is computed for each sequence, and averaged over sequences. Only with `balance`.

    ``f`` and ``P`` then belong to one sequence (https://arxiv.org/abs/2412.19437, equations 17 to 20). Megatron-LM calls this
    `moe_router_load_balancing_type` "seq_aux_loss" (`megatron/core/transformer/moe/router.py`). All positions of a row count,
    also if it packs documents or has ignored labels. The loss is the same for all ways to split rows over microbatches,
    pipeline chunks and ranks. A row without positions is a sequence of length 1."""
    router_bias_rate: float = 0.0
    """Step size of a bias for load balancing without a loss, 0 to 1; 0 disables it (https://arxiv.org/abs/2408.15664).

    Each step adds ``rate * sign(mean(counts) - counts)`` to the buffer ``router.expert_bias``, which starts at zero. ``counts``
    says how many positions chose each expert in the whole step. The bias changes which experts are chosen, but not their weights.
    """
    activation: Activation = Activation.SILU
    """Activation on the gate projection."""
    bias: bool = False
    """Whether the experts' linears have a bias; the router has none."""
    norm: Norm | None = None
    """Normalization before router and experts, with learned weights; None disables it."""
    residual: bool = True
    """Whether the layer adds its input to its output."""
    dropout: float = 0.0
    """Probability of zeroing an output element, 0 to 0.9. Masks are drawn with the data, so all ranks and the single-device run
    agree."""
    frozen: bool = False
    """Whether this layer's parameters have `requires_grad=False`."""

    def __post_init__(self) -> None:
        require_between(self, "hidden", 1, MAX_HIDDEN)
        require_between(self, "num_experts", 2, MAX_EXPERTS)
        require_between(self, "top_k", 1, MAX_CHOSEN)
        require_between(self, "balance", 0.0, MAX_BALANCE)
        require_between(self, "router_bias_rate", 0.0, MAX_ROUTER_BIAS_RATE)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)
        if self.normalised and self.top_k == 1:
            raise invalid_field(self, "normalised", "False if top_k is 1", "a single weight would always be 1")
        if self.balance_per_sequence and not self.balance:
            raise invalid_field(self, "balance_per_sequence", "False if balance is 0")
        if self.grouped and not self.dispatched:
            raise invalid_field(self, "grouped", "False if dispatched is False")

    @property
    def chooses_all(self) -> bool:
        """Whether every position gets every expert, and nothing else depends on the router's choices."""
        return self.top_k == self.num_experts and not self.balance and not self.router_bias_rate

    @property
    def ends_in_linear(self) -> bool:
        """False, because the output is a weighted sum."""
        return False

    @property
    def ends_in_routed_sum(self) -> bool:
        """Whether the output comes directly from the weighted sum over selected experts."""
        return not (self.residual or self.dropout or self.shared)

    @property
    def has_matrices_only(self) -> bool:
        """False, because the experts' parameters have three dims."""
        return False

    def rounded_up(self, multiple: int) -> Experts:
        """Return a copy with hidden features and number of experts rounded up to multiples of `multiple`.

        If a rounded number exceeds its maximum, `multiple` is used instead, or the maximum if that is smaller.
        """
        hidden, experts = -(-self.hidden // multiple) * multiple, -(-self.num_experts // multiple) * multiple
        return replace(
            self,
            hidden=hidden if hidden <= MAX_HIDDEN else min(multiple, MAX_HIDDEN),
            num_experts=experts if experts <= MAX_EXPERTS else min(multiple, MAX_EXPERTS),
        )

    def without_routing(self) -> GatedMLP:
        """Return a single gated MLP with the same hidden size, which computes every position."""
        names = ("hidden", "activation", "bias", "norm", "residual", "dropout", "frozen")
        return GatedMLP(**{name: getattr(self, name) for name in names})
