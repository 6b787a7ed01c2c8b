"""Tests for single-device runs that sum in other orders."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from equivcheck import Outcome, Scenario, check
from equivcheck.oracle.reference import summation
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.reference.summation import clip_by_wide_norm, clip_flat
from equivcheck.scenario import (
    DDP,
    SGD,
    Activation,
    Adafactor,
    Attention,
    AuxiliaryLinear,
    Axis,
    ClipNorm,
    ContextParallel,
    CrossEntropy,
    Data,
    GatedMLP,
    Head,
    IgnoredLabels,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    NormType,
    Parallelism,
    Pipeline,
    Precision,
    Split,
    TensorParallel,
    Tokens,
    Training,
)
from equivcheck.worlds.trace.differences import Phase

ALIKE = Training(
    model=Model(features=12, layers=(Layer(width=32),)),
    data=Data(microbatches=(20,), batch_dim=1),
    clipping=ClipNorm(max_norm=0.1, norm_type=NormType.ONE),
    loss=Loss.LINEAR_MEAN,
    steps=2,
    seed=2781109,
)
"""With a linear and a mean over its outputs, all rows of the weight have the same gradient."""


def alike(number: int) -> list[torch.Tensor]:
    """Two parameters whose gradients have the same number everywhere."""
    parameters: list[torch.Tensor] = [nn.Parameter(torch.zeros(number, dtype=torch.float64)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((number,), 0.1, dtype=torch.float64)
    return parameters


@pytest.mark.parametrize(
    ("norm_type", "exact"),
    [(NormType.ONE, math.fsum([0.1] * 2000)), (NormType.TWO, math.sqrt(math.fsum([0.1 * 0.1] * 2000))), (NormType.INF, 0.1)],
)
def test_a_norm_summed_widely_is_rounded_once(norm_type: NormType, exact: float) -> None:
    """The norm equals exact arithmetic, and gradients are clipped by it."""
    parameters = alike(1000)

    norm = clip_by_wide_norm(nn.Module(), parameters, ClipNorm(max_norm=exact / 2, norm_type=norm_type))

    assert float(norm) == pytest.approx(exact, rel=2.3e-16)
    assert parameters[1].grad is not None
    assert float(parameters[1].grad[0]) == pytest.approx(0.05, rel=1e-5)


@pytest.mark.parametrize("clip", [clip_flat, clip_by_wide_norm])
def test_clipping_goes_by_the_gradients_that_are_there(clip: Callable[..., torch.Tensor]) -> None:
    """Parameters without a gradient are skipped."""
    parameters = [*alike(3), nn.Parameter(torch.zeros(4, dtype=torch.float64))]

    assert float(clip(nn.Module(), parameters, ClipNorm(max_norm=1.0, norm_type=NormType.ONE))) == pytest.approx(0.6)


def accepted_shares(run: ReferenceRun, phase: Phase) -> tuple[float, float]:
    """Largest accepted error relative to a tensor, at the first step: in the first comparison, and in the confirming one."""
    quick, sure = (
        next(moment for moment in found.moments if moment.phase is phase)
        for found in (run.reference(), run.confirming_reference())
    )
    return max(quick.tolerances / quick.norms), max(sure.tolerances / sure.norms)


def test_how_far_the_norm_of_the_reference_is_off_counts_as_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perturbed copies sum in the same order, and equal terms all round the same way. The error is planted."""
    off = 1e-12
    monkeypatch.setattr(summation, "clip_by_wide_norm", lambda *given: clip_by_wide_norm(*given) * (1.0 + off))
    quick, sure = accepted_shares(ReferenceRun(replace(ALIKE, seed=1)), Phase.CLIPPING)
    assert quick < off < sure


def test_a_norm_that_ranks_find_more_exactly_is_no_finding() -> None:
    """Four ranks sum a quarter each, and err less than one device."""
    mesh = Mesh(axes=(Axis(name="dp", size=1), Axis(name="tp", size=4)))
    layout = Layout(mesh=mesh, parallelisms=(TensorParallel(plan=(LayerPlan(split=Split.ROWWISE),)), DDP()))

    assert check(Scenario(training=ALIKE, layout=layout)).is_clear


CANCELLING = Scenario(
    training=Training(
        model=Model(
            features=1,
            length=3,
            source=Tokens(vocabulary=8, padding=0),
            layers=(
                GatedMLP(hidden=6, activation=Activation.RELU, dropout=0.25),
                Attention(num_heads=4, num_kv_heads=4, head_dim=1),
                GatedMLP(hidden=6, activation=Activation.RELU),
            ),
            head=Head(bias=True),
            scale=True,
        ),
        data=Data(microbatches=(6, 12, 12, 9), batch_dim=1),
        optimizer=Adafactor(lr=0.1, implementation=Implementation.FOREACH, beta2_decay=-0.5, eps=(0.001, 0.1)),
        loss=CrossEntropy(ignored=IgnoredLabels.FIRST_ROWS, label_smoothing=0.1, class_weights=True, z_loss=0.01),
        precision=Precision.FLOAT32,
        seed=1700,
    ),
    layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=3),)), parallelisms=(DDP(),)),
)
"""One row's gradient in a query is a difference between numbers a thousand times larger, for any inputs."""


def test_ranks_that_scale_losses_of_which_gradients_cancel_are_no_finding() -> None:
    """Ranks multiply losses by their number before they average, so the backward rounds differently."""
    assert check(CANCELLING).outcome is Outcome.EQUIVALENT


def test_what_is_rounded_on_the_way_back_moves_as_losses_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss scales move it, but inputs do not. Output gradients have bfloat16's digits here."""
    exact = functional.mse_loss

    def rounded(outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        outputs.register_hook(lambda gradient: gradient.bfloat16().to(gradient.dtype))  # type: ignore[no-untyped-call]
        return exact(outputs, targets, reduction=reduction)

    monkeypatch.setattr(functional, "mse_loss", rounded)
    training = Training(
        model=Model(features=3, layers=(Layer(width=4),)), data=Data(microbatches=(5,)), optimizer=Adafactor(), seed=8128
    )
    quick, sure = accepted_shares(ReferenceRun(training), Phase.GRADIENT)
    assert quick < 1e-12
    assert sure > 1e-4


ONE_FEATURE = Scenario(
    training=Training(
        model=Model(
            features=16,
            layers=(
                Layer(width=22, bias=False, activation=Activation.SILU, auxiliary=AuxiliaryLinear.EVEN_STEPS),
                Layer(width=12, activation=Activation.SILU),
                Layer(width=5),
                Layer(width=2, activation=Activation.SIGMOID, dropout=0.5),
                Layer(width=25, activation=Activation.SIGMOID, norm=Norm.RMS, frozen=True),
            ),
        ),
        data=Data(microbatches=(1,)),
        optimizer=SGD(lr=0.1, weight_decay=0.1, momentum=0.5, nesterov=True),
        loss=Loss.LINEAR_SUM,
        clipping=ClipNorm(max_norm=1.0),
        steps=2,
        seed=14198477,
    ),
    layout=Layout(
        mesh=Mesh(axes=(Axis(name="tp", size=2),)),
        parallelisms=(TensorParallel(plan=(*(LayerPlan(),) * 4, LayerPlan(split=Split.COLWISE))),),
    ),
)
"""In step 1 dropout leaves one of two features to the last norm, so only rounding reaches the trained parameters."""


@pytest.mark.torch(">=2.11", "earlier versions give a frozen linear that is split a gradient")
def test_gradients_that_cancel_move_on_any_number_of_ranks() -> None:
    """With a power of two, or one data rank, the loss scale rounds nothing."""
    assert ReferenceRun.of(ONE_FEATURE).num_parts == 1
    assert check(ONE_FEATURE).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize(("axes", "num_parts"), [({"dp": 2}, 2), ({"cp": 2}, 2), ({"dp": 2, "cp": 2}, 4)])
def test_positions_of_ranks_are_parts_as_their_rows_are(axes: dict[str, int], num_parts: int) -> None:
    """Each rank has a partial sum for every gradient. Adafactor divides a small sum over few tokens separately."""
    of_axes = {"dp": DDP(), "cp": ContextParallel()}
    layout = Layout(
        mesh=Mesh(axes=tuple(Axis(name=name, size=size) for name, size in axes.items())),
        parallelisms=tuple(of_axes[name] for name in reversed(axes)),
    )
    assert ReferenceRun.of(replace(ONE_FEATURE, layout=layout)).num_parts == num_parts


@pytest.mark.parametrize(("names", "num_parts"), [(("pp",), 3), (("dp", "pp"), 6), (("pp", "cp"), 6)])
def test_the_confirming_reference_sums_over_chunks(names: tuple[str, ...], num_parts: int) -> None:
    """A pipeline computes chunks of each rank's rows, so its products have other shapes, and round differently."""
    inner: dict[str, Parallelism] = {"dp": DDP(), "cp": ContextParallel()}
    mesh = Mesh(axes=tuple(Axis(name=name, size=2) for name in names))
    parallelisms = (Pipeline(num_chunks=3), *(inner[name] for name in names if name in inner))
    example = Scenario(training=ALIKE, layout=Layout(mesh=mesh, parallelisms=parallelisms))
    assert ReferenceRun.of(example).num_parts == num_parts
