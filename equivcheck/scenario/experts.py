"""A layer whose rows are each computed by a few of its experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from equivcheck.scenario.layer_base import Activation, AnyLayer, Norm
from equivcheck.scenario.noun import noun, refuse, require_between
from equivcheck.scenario.token_layers import MAX_DROPOUT, MAX_HIDDEN, GatedMLP
from equivcheck.system.choice import Choice

MAX_EXPERTS = 32
"""More than are drawn: ranks may ask for a multiple."""
MAX_CHOSEN = 2
MAX_BALANCE = 1.0


class Scores(Choice):
    """What a router makes of its logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@noun
class Experts(AnyLayer):
    """Gated perceptrons side by side, of which a router chooses a few for each position by their scores.

    ``residual(dropout(sum of weight * expert(norm(x)) over the chosen + shared(norm(x))))``. Of equal scores the first expert is
    chosen. The parameters of all experts lie in one tensor for each linear, with the experts as first dim, so that an expert
    that nobody has chosen has a gradient of zeros, on one device and on every rank, never none.
    """

    tag: ClassVar[str] = "experts"
    hidden: int
    """Features within each expert, 1 to 32."""
    num_experts: int = 2
    """Experts to choose from, 2 to 32; the shared one is none of them."""
    top_k: int = 1
    """Experts chosen for each position, 1 or 2."""
    scores: Scores = Scores.SOFTMAX
    """What the router makes of its logits; an expert's score is its weight."""
    normalised: bool = False
    """Whether the weights of the chosen are divided by their sum; with `top_k` of 2 only."""
    weighs_input: bool = False
    """Whether what enters an expert is weighted, rather than what leaves it."""
    shared: bool = False
    """Whether there is one expert more, which computes every position, without weight."""
    dispatched: bool = False
    """Whether an expert is given the positions alone that have chosen it; else it computes all, and the others count nothing."""
    balance: float = 0.0
    """Coefficient of an auxiliary loss that is least where all experts are chosen alike, 0 to 1; 0 for none.

    It times the number of experts times the sum over them of f * P (https://arxiv.org/abs/2101.03961, equation 4), where f is an
    expert's share of all choices in a microbatch, without gradient, and P the mean over all its positions of the expert's share
    of a position's scores. It is added to the loss as a mean over rows, whatever the loss is: that of each microbatch counts by
    its share of the step's rows."""
    activation: Activation = Activation.SILU
    """What follows the gate."""
    bias: bool = False
    """Whether the linears of the experts have a bias; the router has none."""
    norm: Norm | None = None
    """What normalises the input, of the router too, with learnt weights; None for nothing."""
    residual: bool = True
    """Whether the layer's input is added to its output."""
    dropout: float = 0.0
    """Probability of zeroing an output, 0 to 0.9; the mask belongs to the data: the same on one device and on many."""
    frozen: bool = False
    """Whether the parameters of this layer require no gradient."""

    def __post_init__(self) -> None:
        require_between(self, "hidden", 1, MAX_HIDDEN)
        require_between(self, "num_experts", 2, MAX_EXPERTS)
        require_between(self, "top_k", 1, MAX_CHOSEN)
        require_between(self, "balance", 0.0, MAX_BALANCE)
        require_between(self, "dropout", 0.0, MAX_DROPOUT)
        if self.normalised and self.top_k == 1:
            raise refuse(self, "normalised", "False with top_k 1: a single weight would be 1 whatever its score")

    @property
    def ends_in_linear(self) -> bool:
        """What leaves it is a sum."""
        return False

    @property
    def has_matrices_only(self) -> bool:
        """The experts' linears have three dims."""
        return False

    def rounded(self, multiple: int) -> Experts:
        """As many features within, and as many experts, as the next multiple; where that is too many, the multiple."""
        hidden, experts = -(-self.hidden // multiple) * multiple, -(-self.num_experts // multiple) * multiple
        return replace(
            self,
            hidden=hidden if hidden <= MAX_HIDDEN else min(multiple, MAX_HIDDEN),
            num_experts=experts if experts <= MAX_EXPERTS else min(multiple, MAX_EXPERTS),
        )

    def without_routing(self) -> GatedMLP:
        """One expert, for every position."""
        names = ("hidden", "activation", "bias", "norm", "residual", "dropout", "frozen")
        return GatedMLP(**{name: getattr(self, name) for name in names})
