"""The noise floor of softmaxes that ranks compute otherwise than one device: by logarithms of sums, or without."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from equivcheck import Outcome, Scenario, check
from equivcheck.oracle.reference import reference as module
from equivcheck.oracle.reference.logarithms import ByLogarithms, loss_by_sums
from equivcheck.scenario import (
    Activation,
    Adafactor,
    Attention,
    Axis,
    ClipNorm,
    ClipValue,
    ContextParallel,
    CrossEntropy,
    Data,
    Exchange,
    Experts,
    GatedMLP,
    Head,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    NormType,
    Scores,
    Split,
    Tokens,
    Training,
)
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.layers.sequence import WHOLE
from equivcheck.training.loss import loss_of
from equivcheck.training.material import IGNORED
from equivcheck.training.setup import Setup

OFF = 1e-11
"""Error that is planted in logarithms of about a thousand: a hundred units in the last place, whatever a processor rounds."""
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


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Compute all references in the test, because an error is planted in some, and keep none of them for other tests."""
    kept = (module._trace, module._reference, module._confirming_reference)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.fixture
def logarithms_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the same error in the logarithms of ranks and of the reference that imitates them."""
    exact = torch.Tensor.log
    monkeypatch.setattr(torch.Tensor, "log", lambda values: exact(values) + OFF)


def assert_the_floor_needs(
    trace: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch, alter: Callable[[Setup], None] | None = None
) -> None:
    """The planted error is within a floor that has this run of the reference, and far beyond one that lacks it."""
    assert check(scenario, alter=alter).outcome is Outcome.EQUIVALENT
    module._confirming_reference.cache_clear()
    monkeypatch.setattr(module, trace, lambda training: module._trace(training, None))
    verdict = check(scenario, alter=alter)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.worst_error > 100.0


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


def test_honest_ranks_of_a_ring_are_within_the_floor() -> None:
    """Large scores are rounded, and with them the logarithms that ranks compute weights of."""
    assert check(SCENARIO).outcome is Outcome.EQUIVALENT


@pytest.mark.usefixtures("logarithms_are_off")
def test_a_ring_over_large_scores_is_within_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithms of large scores are off by more than moved inputs or other sums show."""
    assert_the_floor_needs("logarithm_trace", SCENARIO, monkeypatch)


@pytest.mark.parametrize("exchange", [Exchange.GATHER, Exchange.ULYSSES])
def test_other_exchanges_compute_one_softmax(exchange: Exchange) -> None:
    """They need no such floor where attention is not fused, and have none."""
    other = replace(SCENARIO, layout=replace(LAYOUT, parallelisms=(ContextParallel(exchange=exchange),)))
    assert [module.ReferenceRun.of(each).by_logarithms for each in (SCENARIO, other)] == [True, False]
    assert check(other).outcome is Outcome.EQUIVALENT


FUSED = Training(
    model=Model(
        features=1,
        length=4,
        layers=(
            Experts(hidden=6, top_k=2, weighs_input=True),
            Attention(heads=3, kv_heads=3, residual=False),
            Attention(heads=6, kv_heads=2, causal=False, rotary=True, fused=True, residual=False, dropout=0.25),
        ),
    ),
    data=Data(microbatches=(6,)),
    optimizer=Adafactor(weight_decay=0.1, implementation=Implementation.FOREACH),
    loss=Loss.LINEAR_MEAN,
    clipping=ClipNorm(max_norm=0.01, norm_type=NormType.INF),
    steps=3,
    seed=699,
)
"""Scores of 700, and gradients of queries and keys that Adafactor divides by themselves."""


FUSED_SCENARIO = Scenario(training=FUSED, layout=replace(LAYOUT, parallelisms=(ContextParallel(exchange=Exchange.ULYSSES),)))


class _SeesAll(_Causal):
    """Heads that look at all positions."""

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> None:  # type: ignore[override]
        """No position."""


def attend_by_logarithms(setup: Setup) -> None:
    """Let the fused attention of ranks compute weights of logarithms, as a kernel may that rounds by strides."""
    for each in setup.model.modules():
        if isinstance(each, AttentionModule) and each.layer.fused:
            each.attend = lambda *given: ByLogarithms().attended(_SeesAll(), *given)  # type: ignore[method-assign]


def test_honest_ranks_that_have_some_heads_are_within_the_floor() -> None:
    """Products of other strides are rounded otherwise."""
    assert check(FUSED_SCENARIO).outcome is Outcome.EQUIVALENT


@pytest.mark.usefixtures("logarithms_are_off")
def test_fused_attention_of_some_heads_is_within_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are off by units in the last place of large scores are no finding."""
    assert_the_floor_needs("logarithm_trace", FUSED_SCENARIO, monkeypatch, alter=attend_by_logarithms)


EXPLODING = Training(
    model=Model(
        features=1,
        length=2,
        source=Tokens(vocabulary=16, learned_positions=True, frozen=True),
        layers=(
            Experts(
                hidden=6,
                num_experts=3,
                weighs_input=True,
                shared=True,
                balance=0.01,
                activation=Activation.IDENTITY,
                dropout=0.25,
            ),
            Attention(heads=8, kv_heads=8, head_width=4, fused=True, frozen=True),
            Attention(heads=8, kv_heads=8, head_width=4, rotary=True, bias=True, residual=False, dropout=0.25, frozen=True),
            GatedMLP(hidden=1, activation=Activation.IDENTITY, bias=True),
            Layer(width=1, bias=False, activation=Activation.GELU, residual=True),
        ),
        head=Head(),
    ),
    data=Data(microbatches=(4, 4, 4), batch_dim=1),
    loss=CrossEntropy(z_loss=0.01),
    seed=3265997,
)
"""Logits of hundreds, of which the largest is alone."""


def by_classes() -> Scenario:
    """Two ranks that have half of the classes each."""
    plan = (LayerPlan(split=Split.OUTSIDE), *(LayerPlan(split=Split.WITHIN),) * 2, LayerPlan(), LayerPlan())
    parallelism = LocalTensorParallel(plan=plan, source=Split.REPLICATED, head=Split.COLUMN, loss_parallel=True)
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(parallelism,))
    return Scenario(training=EXPLODING, layout=layout)


def test_honest_ranks_that_have_some_classes_are_within_the_floor() -> None:
    """They are exact, and one device is off by units in the last place of logits."""
    assert check(by_classes()).outcome is Outcome.EQUIVALENT


def test_a_z_loss_over_large_logits_in_parts_is_within_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is one device in whose logarithms an error is planted."""
    exact = torch.Tensor.logsumexp
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda logits, dim: exact(logits, dim) * (1.0 + OFF))
    assert_the_floor_needs("summed_trace", by_classes(), monkeypatch)


def test_it_is_cross_entropy() -> None:
    """Loss and gradient are those of torch, but for rounding, padding and smoothing included."""
    training = replace(EXPLODING, loss=CrossEntropy(z_loss=0.01, label_smoothing=0.1, class_weights=True))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.tensor([[0, 4], [IGNORED, 2], [1, IGNORED]])
    found = [loss(training, logits, labels, 4.0) for loss in (loss_of, loss_by_sums)]
    torch.testing.assert_close(*found, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in found), rtol=1e-12, atol=1e-15)
