"""The noise floor of attention whose weights are computed again from logarithms of their sums."""

from dataclasses import replace

import pytest
import torch

from equivcheck import Outcome, Scenario, check
from equivcheck.layers.sequence import WHOLE
from equivcheck.reference import reference as module
from equivcheck.reference.logarithms import ByLogarithms
from equivcheck.scenario import (
    Activation,
    Attention,
    Axis,
    ClipValue,
    ContextParallel,
    CrossEntropy,
    Data,
    Exchange,
    Experts,
    GatedMLP,
    Head,
    Layout,
    Mesh,
    Model,
    Scores,
    Tokens,
    Training,
)

TRAINING = Training(
    model=Model(
        features=1,
        length=8,
        source=Tokens(vocabulary=11, padding=10, learned_positions=True),
        layers=(
            Experts(hidden=8, num_experts=3, top_k=2, scores=Scores.SIGMOID, balance=0.01, activation=Activation.GELU),
            GatedMLP(hidden=8),
            Attention(heads=2, rotary=True),
            GatedMLP(hidden=6, activation=Activation.RELU, residual=False),
        ),
        head=Head(tied=True),
        scale=True,
    ),
    data=Data(microbatches=(2,)),
    loss=CrossEntropy(label_smoothing=0.1),
    clipping=ClipValue(),
    seed=12925630,
)
"""Scores of a thousand: gradients of 700 that are clipped to 0.1, beside some of 0.01 that a softmax nearly cancels."""
LAYOUT = Layout(mesh=Mesh(axes=(Axis(name="cp", size=2),)), parallelisms=(ContextParallel(exchange=Exchange.RING),))
SCENARIO = Scenario(training=TRAINING, layout=LAYOUT)


class _Causal:
    """Four heads that look back."""

    def grouped(self, values: torch.Tensor) -> torch.Tensor:
        """Each for itself."""
        return values

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """What comes later."""
        return keys > queries[:, None]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As torch does."""
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def attend_from(self, *_values: object) -> torch.Tensor:
        """Of parts of sequences alone."""
        raise AssertionError


def test_it_is_attention() -> None:
    """What is found, and gradients of queries, keys and values, are those of any attention."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=generator)
    found = [sequence.attended(_Causal(), *given) for sequence in (WHOLE, ByLogarithms())]
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(values, given, weight) for values in found]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


def test_a_ring_over_large_scores_is_within_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are honest whose weights are off by units in the last place of scores; neither inputs nor sums move them so far."""
    assert check(SCENARIO).outcome is Outcome.EQUIVALENT
    module._confirming_reference.cache_clear()
    monkeypatch.setattr(module, "logarithm_trace", lambda training: module._trace(training, None))
    assert check(SCENARIO).outcome is Outcome.DIVERGED
    module._confirming_reference.cache_clear()


@pytest.mark.parametrize("exchange", [Exchange.GATHER, Exchange.ULYSSES])
def test_other_exchanges_compute_one_softmax(exchange: Exchange) -> None:
    """They need no such floor."""
    layout = replace(LAYOUT, parallelisms=(ContextParallel(exchange=exchange),))
    assert check(replace(SCENARIO, layout=layout)).outcome is Outcome.EQUIVALENT
