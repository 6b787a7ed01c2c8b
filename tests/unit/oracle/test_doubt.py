"""Tests for steps that a reference cannot decide."""

from dataclasses import replace

import numpy as np
import pytest

from equivcheck.oracle.reference.doubt import NO_GRADIENT, Doubt, doubt_about, earlier_doubt, first_step_dominated_by_noise
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import ReferenceRun, noise_limit
from equivcheck.scenario import SGD, Activation, Data, Layer, Model, Norm, Training
from equivcheck.worlds.trace.differences import Phase

TRAINING = Training(
    model=Model(features=4, layers=(Layer(width=3, activation=Activation.TANH, norm=Norm.LAYER), Layer(width=2))),
    data=Data(microbatches=(4,)),
    steps=3,
)


def moments() -> tuple[Expected, ...]:
    """Moments from a training without doubt."""
    return ReferenceRun(TRAINING).reference().moments


def with_tolerances(phase: Phase, step: int, tolerance: float) -> Doubt | None:
    """The doubt if rounding moves every tensor in one moment by the same share of its kind."""
    altered = tuple(
        replace(moment, tolerances=tolerance * moment.scales) if (moment.phase, moment.step) == (phase, step) else moment
        for moment in moments()
    )
    return doubt_about(altered, noise_limit(TRAINING))


def without_gradients(steps: int) -> tuple[Expected, ...]:
    """Moments whose gradients in the first steps are zero."""
    return tuple(
        replace(moment, norms=np.zeros_like(moment.norms)) if moment.phase is Phase.GRADIENT and moment.step < steps else moment
        for moment in moments()
    )


def test_a_well_conditioned_training_leaves_no_doubt() -> None:
    """Every step is decided."""
    assert doubt_about(moments(), noise_limit(TRAINING)) is None


@pytest.mark.parametrize("lr", [1e300, 1e100])
def test_a_training_that_blows_up_proves_nothing_from_there_on(lr: float) -> None:
    """An overflow in the update is a doubt at once, an overflow in the next forward a step later."""
    training = replace(TRAINING, model=Model(features=4, layers=(Layer(width=3),) * 3), optimizer=SGD(lr=lr))
    found = ReferenceRun(training).reference().doubt

    assert found is not None
    assert "not finite" in found.reason
    assert found.step == (0 if lr == 1e300 else 1)


def test_what_explodes_is_drowned_and_what_cancels_is_not() -> None:
    """Noise exceeds the values in both cases. With cancellation, it is small relative to earlier values."""
    limit, found = noise_limit(TRAINING), moments()
    assert first_step_dominated_by_noise(found, limit) is None

    def with_gradients(scale: float, noise: float) -> tuple[Expected, ...]:
        return tuple(
            replace(one, scales=one.scales * scale, tolerances=one.scales * noise)
            if (one.phase, one.step) == (Phase.GRADIENT, 1)
            else one
            for one in found
        )

    assert first_step_dominated_by_noise(with_gradients(1e15, 1e16), limit) == 1
    assert first_step_dominated_by_noise(with_gradients(1e-16, 1e-15), limit) is None
    assert first_step_dominated_by_noise(with_gradients(1e15, 1e14), limit) is None


def test_a_dead_network_proves_nothing() -> None:
    """Zero gradients agree with any layout, so a reference with no others is in doubt."""
    layer = Layer(width=1, bias=False, norm=Norm.LAYER, activation=Activation.RELU)
    often_dead = replace(TRAINING, model=Model(features=1, layers=(layer,)), steps=1)

    doubts = {ReferenceRun(replace(often_dead, seed=seed)).reference().doubt for seed in range(20)}

    assert Doubt(reason=NO_GRADIENT, step=0) in doubts
    assert len(doubts) > 1


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_floor_of_more_than_half_the_digits_proves_nothing_from_there_on(step: int) -> None:
    """If rounding moves a tensor by more than sqrt(eps), relative to its kind, the doubt names the tensor and step."""
    found = with_tolerances(Phase.UPDATE, step, 1e-7)

    assert found is not None
    assert found.step == step
    assert (
        found.reason
        == f"rounding noise in layers.0.norm.weight is 1e-05 % of the largest tensor of its kind at step {step} (update)"
    )


def test_noise_has_no_share_of_zeros() -> None:
    """Gradients can cancel to zero on one device, but not in perturbed copies."""
    cancelled = tuple(
        replace(one, norms=0.0 * one.norms, scales=0.0 * one.scales) if (one.phase, one.step) == (Phase.GRADIENT, 1) else one
        for one in moments()
    )
    reason = "layers.0.norm.weight and all tensors of its kind are zero except for rounding at step 1 (gradient)"
    assert doubt_about(cancelled, noise_limit(TRAINING)) == Doubt(reason=reason, step=1)


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf")])
@pytest.mark.parametrize("phase", [Phase.LOSS, Phase.UPDATE])
def test_a_tolerance_without_bounds_proves_nothing(phase: Phase, tolerance: float) -> None:
    """If a perturbed copy overflows, the tolerance is infinite, even for a loss."""
    found = with_tolerances(phase, 1, tolerance)

    assert found == Doubt(
        reason=f"rounding makes values of the single-device run infinite or NaN at step 1 ({phase.value})", step=1
    )


def test_steps_before_any_gradient_do_not_count() -> None:
    """If the reference fails later, earlier steps with zero gradients prove nothing either."""
    lost = tuple(
        replace(moment, norms=moment.norms * np.inf) if moment.step == 2 else moment for moment in without_gradients(steps=2)
    )

    found = doubt_about(lost, noise_limit(TRAINING))

    assert found is not None
    assert (found.step, "not finite" in found.reason) == (0, True)
    assert doubt_about(without_gradients(steps=2), noise_limit(TRAINING)) is None


def test_the_earlier_of_two_doubts_counts() -> None:
    """The earlier doubt leaves fewer steps. No doubt leaves all."""
    one, other = Doubt(reason="one", step=1), Doubt(reason="other", step=2)

    assert earlier_doubt(one, other) is earlier_doubt(other, one) is one
    assert earlier_doubt(None, other) is earlier_doubt(other, None) is other
    assert earlier_doubt(None, None) is None
