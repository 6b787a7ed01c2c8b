"""Tests for the reference of a low-precision layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from equivcheck import check
from equivcheck.layouts.base.data_rows import rows_of
from equivcheck.layouts.base.rounding import WHOLE, Division, Rounding, WhenReduced
from equivcheck.oracle.reference.perturbed_rounding import PerturbedRounding, Shuffled
from equivcheck.oracle.reference.reference import ReferenceRun, noise_limit
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.scenario import (
    DDP,
    Activation,
    Adam,
    Axis,
    ClipNorm,
    Compression,
    Data,
    ElementType,
    Layer,
    Layout,
    LowPrecision,
    Mesh,
    Model,
    Norm,
    Precision,
    Scenario,
    Training,
    ZeroGrad,
)
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.material import material

TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=4, norm=Norm.LAYER, dropout=0.5), Layer(width=2)), counter=True),
    data=Data(microbatches=(6, 12)),
    optimizer=Adam(),
    clipping=ClipNorm(max_norm=0.1),
    steps=3,
)
LINEAR = Training(model=Model(features=3, layers=(Layer(width=2, bias=False),)), data=Data(microbatches=(4,)))
FP64 = ElementType.FLOAT64


@pytest.mark.parametrize("division", list(Division))
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_without_lower_precision_it_is_the_ordinary_reference(division: Division, once: bool, whole: bool) -> None:
    """In the training's own precision, any way to accumulate and average parts gives the ordinary result."""
    when = WhenReduced(once=once, whole=whole)
    assert_ordinary(Rounding(replicas=2, shards=3, when=when, compute=FP64, reduce=FP64, division=division))


@pytest.mark.parametrize("division", list(Division))
def test_neither_another_divisor_nor_sums_that_wait_change_gradients(division: Division) -> None:
    """The loss scale compensates a divisor, and replicas may reduce once or at each microbatch."""
    assert_ordinary(Rounding(replicas=2, shards=3, division=division, divisor=2.5, replicas_once=True))


def assert_ordinary(rounding: Rounding) -> None:
    """A device that rounds nothing gives the ordinary result."""
    ours, plain = train(rounded_setup(TRAINING, rounding)), train(single_device_setup(TRAINING))
    for step, expected in zip(ours.steps, plain.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=1e-12)
        np.testing.assert_allclose(step.gradients.values, expected.gradients.values, rtol=1e-9, atol=1e-14)
        np.testing.assert_allclose(step.parameters.values, expected.parameters.values, rtol=1e-6)
    np.testing.assert_array_equal(ours.buffers.values, plain.buffers.values)


@pytest.mark.parametrize("zero_grad", [ZeroGrad.NONE, ZeroGrad.ZERO], ids=str)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.FP16], ids=str)
def test_ranks_of_ddp_leave_its_very_bits(compression: Compression, bucket_view: bool, zero_grad: ZeroGrad) -> None:
    """DDP on six ranks is bit for bit equal: gradients are scaled when copied to a bucket, or divided in it."""
    ddp = DDP(autocast=LowPrecision.FLOAT16, compression=compression, gradient_as_bucket_view=bucket_view)
    layers = (Layer(width=12, activation=Activation.SILU), Layer(width=12))
    training = Training(
        model=Model(features=19, layers=layers),
        data=Data(microbatches=(24, 12)),
        precision=Precision.FLOAT32,
        zero_grad=zero_grad,
        steps=2,
    )
    verdict = check(Scenario(training=training, layout=Layout(mesh=Mesh(axes=(Axis(name="dp", size=6),)), parallelisms=(ddp,))))
    verdict.assert_equivalent()
    assert verdict.worst_error == 0.0


def test_compressed_gradients_are_halved_before_they_are_added() -> None:
    """Both ranks cast gradients to float16 and divide them, and the sum is in float16 as well."""
    rounding = Rounding(replicas=1, shards=2, when=WHOLE, reduce=ElementType.FLOAT16)
    drawn = material(LINEAR)
    weight, batch = drawn.parameters["layers.0.linear.weight"], drawn.steps[0][0]
    halves = []
    for part in range(2):
        rows = rows_of(batch, part, 2)
        errors = rows.inputs @ weight.T - rows.targets
        halves.append((2 / errors.numel() * errors.T @ rows.inputs).to(torch.float16) / 2)

    (step,) = train(rounded_setup(LINEAR, rounding)).steps

    assert step.gradients.values.tolist() == (halves[0] + halves[1]).double().flatten().tolist()


@pytest.mark.torch(">=2.10", "no grad_dtype of tensors")
@pytest.mark.parametrize("as_computed", [False, True])
def test_gradients_may_be_reduced_as_backward_computes_them(as_computed: bool) -> None:
    """If a parameter accepts the reduction's type, gradients are not first rounded to the parameter's type."""
    training = Training(
        model=Model(features=3, layers=(Layer(width=4, norm=Norm.RMS),)),
        data=Data(microbatches=(4,)),
        precision=Precision.FLOAT32,
    )
    types = {"compute": ElementType.FLOAT16, "reduce": ElementType.FLOAT32}
    rounding = Rounding(replicas=1, shards=1, grad_dtype=as_computed, **types)

    (step,) = train(rounded_setup(training, rounding)).steps

    gradients = step.gradients.values.astype(np.float32)
    assert np.array_equal(gradients, gradients.astype(np.float16)) is not as_computed


def test_it_is_run_once_for_each_rounding() -> None:
    """Equal roundings share a reference. The ordinary one is separate."""
    rounding = Rounding(replicas=1, shards=2, compute=ElementType.BFLOAT16)
    assert ReferenceRun(TRAINING, rounding).reference() is ReferenceRun(replace(TRAINING), replace(rounding)).reference()
    assert ReferenceRun(TRAINING, rounding).reference() is not ReferenceRun(TRAINING).reference()
    assert ReferenceRun(TRAINING).reference() is ReferenceRun(TRAINING, None).reference()


def test_half_of_the_digits_are_those_of_the_coarsest_type() -> None:
    """Noise is judged by the type with the fewest digits."""
    rounding = Rounding(replicas=1, shards=2, compute=ElementType.BFLOAT16, reduce=ElementType.FLOAT32)
    assert noise_limit(TRAINING, rounding) == pytest.approx(2**-3.5)
    assert noise_limit(TRAINING) == pytest.approx(2**-26)


def test_before_a_divergence_is_believed_roundings_are_flipped() -> None:
    """Two ranks are exact at the first step. Later, a float32 parameter can round the other way."""
    training = replace(TRAINING, precision=Precision.FLOAT32, clipping=None)
    rounding = Rounding(replicas=1, shards=2, compute=ElementType.BFLOAT16, reduce=ElementType.FLOAT32)
    first, *_, last = [
        moment.tolerances.max() / moment.scales.max()
        for moment in ReferenceRun(training, rounding).confirming_reference().moments
        if moment.phase.value == "gradient"
    ]
    assert first < 1e-5 < last


def test_the_first_orders_are_those_of_a_ring() -> None:
    """Ranks in a ring can start at any rank."""
    parts = [torch.tensor(float(part)) for part in range(4)]
    orders = [Shuffled(np.random.default_rng(0), copy).ordered(parts) for copy in range(1, 4)]
    assert [[int(part) for part in order] for order in orders] == [[1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


@pytest.mark.parametrize(("precision", "flips"), [("float32", 1), ("float64", 0)])
def test_a_rounding_is_flipped_where_one_may_be(precision: str, flips: int) -> None:
    """One unit in the last place never matters in a cast from float64 to bfloat16. From float32 it can."""
    shaken = PerturbedRounding(np.random.default_rng(0), 1, precision, "bfloat16")
    exact = torch.linspace(1, 2, 50, dtype=getattr(torch, precision))
    rounded = exact.to(torch.bfloat16)
    changed = shaken.rounded(exact, rounded.clone()) != rounded
    assert int(changed.sum()) == flips


def test_a_rounding_is_flipped_wherever_a_tensor_lies() -> None:
    """Outputs with rows along another dim are not contiguous in memory."""
    shaken = PerturbedRounding(np.random.default_rng(0), 1, "float64", "float32")
    exact = torch.ones(3, 2, 4, dtype=torch.float64).transpose(0, 1)
    rounded = exact.to(torch.float32)
    assert not rounded.is_contiguous()
    assert int((shaken.rounded(exact, rounded) != 1.0).sum()) == 1
