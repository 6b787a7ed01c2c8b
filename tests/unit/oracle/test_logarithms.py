"""The noise floor for softmaxes that ranks compute from logarithms, or one device does."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from equivcheck import Outcome, Scenario, check
from equivcheck.oracle.reference import reference as module
from equivcheck.oracle.reference.logarithms import LogarithmAttention, loss_by_sums
from equivcheck.scenario import (
    SGD,
    Activation,
    Adafactor,
    Attention,
    AttentionExchange,
    Axis,
    ClipNorm,
    ClipValue,
    ContextParallel,
    CrossEntropy,
    Data,
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
    Norm,
    NormType,
    ScoreFunction,
    Split,
    StepLR,
    Tokens,
    Training,
)
from equivcheck.training.labels import IGNORED
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.layers.sequence import FULL_SEQUENCE
from equivcheck.training.loss import loss_of
from equivcheck.training.setup import Setup

OFF = 1e-11
"""Error planted in logarithms near one thousand: a hundred units in the last place, more than any processor rounds."""
TRAINING = Training(
    model=Model(
        features=1,
        length=8,
        source=Tokens(vocabulary=11, padding=10, learned_positions=True),
        layers=(
            Experts(hidden=8, num_experts=3, top_k=2, scores=ScoreFunction.SIGMOID, balance=0.01, activation=Activation.GELU),
            GatedMLP(hidden=8),
            Attention(num_heads=2, rotary=True),
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
"""Scores near one thousand: gradients near 700 that are clipped to 0.1, and some near 0.01 that a softmax nearly cancels."""
LAYOUT = Layout(mesh=Mesh(axes=(Axis(name="cp", size=2),)), parallelisms=(ContextParallel(exchange=AttentionExchange.RING),))
SCENARIO = Scenario(training=TRAINING, layout=LAYOUT)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Compute all references in the test, because an error is planted in some, and cache none for other tests."""
    kept = (module._trace, module._reference, module._confirming_reference)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.fixture
def logarithms_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the same error in the ranks' logarithms and in the reference that imitates them."""
    exact = torch.Tensor.log
    monkeypatch.setattr(torch.Tensor, "log", lambda values: exact(values) + OFF)


def assert_the_floor_needs(
    trace: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch, alter: Callable[[Setup], None] | None = None
) -> None:
    """The planted error is within a floor with this reference run, and far beyond a floor without it."""
    assert check(scenario, alter=alter).outcome is Outcome.EQUIVALENT
    module._confirming_reference.cache_clear()
    plain = module._trace(scenario.training, None)
    monkeypatch.setattr(module, trace, lambda training: [plain] if trace == "logarithm_traces" else plain)
    verdict = check(scenario, alter=alter)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.worst_error > 100.0


class _Causal:
    """Four causal heads."""

    def repeat_kv_heads(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return keys > queries[:, None]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def attend_from(self, *_values: object) -> torch.Tensor:
        raise AssertionError


def test_it_is_attention() -> None:
    """Outputs and gradients for queries, keys and values equal those from torch's attention."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=generator)
    found = [sequence.attend_from_local(_Causal(), *given) for sequence in (FULL_SEQUENCE, LogarithmAttention())]
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(values, given, weight) for values in found]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


def test_honest_ranks_of_a_ring_are_within_the_floor() -> None:
    """Large scores are rounded, and so are the logarithms from which ranks compute weights."""
    assert check(SCENARIO).outcome is Outcome.EQUIVALENT


@pytest.mark.usefixtures("logarithms_are_off")
def test_a_ring_over_large_scores_is_within_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithms from large scores have larger errors than moved inputs or other summation orders show."""
    assert_the_floor_needs("logarithm_traces", SCENARIO, monkeypatch)


@pytest.mark.parametrize("exchange", [AttentionExchange.GATHER, AttentionExchange.ULYSSES])
def test_other_exchanges_compute_one_softmax(exchange: AttentionExchange) -> None:
    """They need no such floor if attention is not fused, and have none."""
    other = replace(SCENARIO, layout=replace(LAYOUT, parallelisms=(ContextParallel(exchange=exchange),)))
    assert [module.ReferenceRun.of(each).rounds_scores for each in (SCENARIO, other)] == [True, False]
    assert check(other).outcome is Outcome.EQUIVALENT


FUSED = Training(
    model=Model(
        features=1,
        length=4,
        layers=(
            Experts(hidden=6, top_k=2, weighs_input=True),
            Attention(num_heads=3, num_kv_heads=3, residual=False),
            Attention(num_heads=6, num_kv_heads=2, causal=False, rotary=True, fused=True, residual=False, dropout=0.25),
        ),
    ),
    data=Data(microbatches=(6,)),
    optimizer=Adafactor(weight_decay=0.1, implementation=Implementation.FOREACH),
    loss=Loss.LINEAR_MEAN,
    clipping=ClipNorm(max_norm=0.01, norm_type=NormType.INF),
    steps=3,
    seed=699,
)
"""Scores near 700, and gradients for queries and keys that Adafactor divides separately."""


FUSED_SCENARIO = Scenario(
    training=FUSED, layout=replace(LAYOUT, parallelisms=(ContextParallel(exchange=AttentionExchange.ULYSSES),))
)


class _SeesAll(_Causal):
    """Heads without a mask."""

    def unseen(self, queries: torch.Tensor, keys: torch.Tensor) -> None:  # type: ignore[override]
        """No position."""


def attend_by_logarithms(setup: Setup, seed: int | None = None) -> None:
    """Let the ranks' fused attention compute weights from logarithms, as a kernel may. A seed perturbs the logarithms."""
    attention = LogarithmAttention(seed)
    for each in setup.model.modules():
        if isinstance(each, AttentionModule) and each.layer.fused:
            each.attend = lambda *given: attention.attend_from_local(_SeesAll(), *given)  # type: ignore[method-assign]


def test_honest_ranks_that_have_some_heads_are_within_the_floor() -> None:
    """Products over other strides round differently."""
    assert check(FUSED_SCENARIO).outcome is Outcome.EQUIVALENT


@pytest.mark.usefixtures("logarithms_are_off")
def test_fused_attention_of_some_heads_is_within_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights with errors in the last place, due to large scores, are no finding."""
    assert_the_floor_needs("logarithm_traces", FUSED_SCENARIO, monkeypatch, alter=attend_by_logarithms)


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_logarithms_rounded_another_way_are_within_the_floor(seed: int) -> None:
    """A processor may round each logarithm to the neighbor of its float."""
    verdict = check(FUSED_SCENARIO, alter=lambda setup: attend_by_logarithms(setup, seed))
    assert verdict.outcome is Outcome.EQUIVALENT


SATURATED = Training(
    model=Model(
        features=6,
        length=3,
        layers=(
            Experts(
                hidden=3,
                num_experts=5,
                scores=ScoreFunction.SIGMOID,
                weighs_input=True,
                activation=Activation.TANH,
                norm=Norm.RMS,
                dropout=0.25,
            ),
            Layer(width=6, bias=False, activation=Activation.TANH, norm=Norm.LAYER),
            Attention(num_heads=6, num_kv_heads=3, head_dim=4, fused=True, norm=Norm.RMS, dropout=0.25),
            Layer(width=6, bias=False),
        ),
    ),
    data=Data(microbatches=(3,)),
    optimizer=SGD(lr=0.1, weight_decay=0.1, maximize=True, implementation=Implementation.FUSED),
    loss=Loss.LINEAR_SUM,
    schedule=StepLR(),
    steps=4,
    seed=40254384,
)
"""Weights of attention that are 0 or 1, so that gradients for scores cancel to zero on one device."""


def test_gradients_that_cancel_are_within_the_floor() -> None:
    """Ranks sum the products of outputs and gradients in another order, so a gradient can be large instead of zero."""
    verdict = check(Scenario(training=SATURATED, layout=LAYOUT))
    assert verdict.outcome is Outcome.EQUIVALENT


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
            Attention(num_heads=8, num_kv_heads=8, head_dim=4, fused=True, frozen=True),
            Attention(num_heads=8, num_kv_heads=8, head_dim=4, rotary=True, bias=True, residual=False, dropout=0.25, frozen=True),
            GatedMLP(hidden=1, activation=Activation.IDENTITY, bias=True),
            Layer(width=1, bias=False, activation=Activation.GELU, residual=True),
        ),
        head=Head(),
    ),
    data=Data(microbatches=(4, 4, 4), batch_dim=1),
    loss=CrossEntropy(z_loss=0.01),
    seed=3265997,
)
"""Logits in the hundreds, with one dominating."""


def by_classes() -> Scenario:
    """Two vocabulary-parallel ranks."""
    plan = (LayerPlan(split=Split.NOT_IN_PLAN), *(LayerPlan(split=Split.HEADS_OR_HIDDEN),) * 2, LayerPlan(), LayerPlan())
    parallelism = LocalTensorParallel(plan=plan, source=Split.REPLICATED, head=Split.COLWISE, loss_parallel=True)
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(parallelism,))
    return Scenario(training=EXPLODING, layout=layout)


def test_honest_ranks_that_have_some_classes_are_within_the_floor() -> None:
    """The ranks are exact, and the single device has errors in the logits' last place."""
    assert check(by_classes()).outcome is Outcome.EQUIVALENT


def test_a_z_loss_over_large_logits_in_parts_is_within_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is planted in the single device's logarithms."""
    exact = torch.Tensor.logsumexp
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda logits, dim: exact(logits, dim) * (1.0 + OFF))
    assert_the_floor_needs("summed_z_loss_trace", by_classes(), monkeypatch)


def test_it_is_cross_entropy() -> None:
    """Loss and gradient equal torch's except for rounding, with padding and label smoothing."""
    training = replace(EXPLODING, loss=CrossEntropy(z_loss=0.01, label_smoothing=0.1, class_weights=True))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.tensor([[0, 4], [IGNORED, 2], [1, IGNORED]])
    found = [loss(training, logits, labels, 4.0) for loss in (loss_of, loss_by_sums)]
    torch.testing.assert_close(*found, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in found), rtol=1e-12, atol=1e-15)
