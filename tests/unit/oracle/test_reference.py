"""Tests for the reference, its noise floor and the doubt about it."""

from dataclasses import replace

import numpy as np
import pytest

from equivcheck.oracle.reference import confirming_reference, doubt_about, noise_limit, reference
from equivcheck.oracle.verdict import Phase
from equivcheck.scenario import SGD, Activation, Data, Layer, Model, Norm, Precision, Training

TRAINING = Training(
    model=Model(features=4, layers=(Layer(width=3, activation=Activation.TANH, norm=Norm.LAYER), Layer(width=2))),
    data=Data(microbatches=(4,)),
    steps=3,
)


def test_a_reference_is_run_once() -> None:
    """Equal trainings share one reference, however often they are looked up."""
    assert reference(TRAINING) is reference(replace(TRAINING))


@pytest.mark.parametrize("precision", list(Precision))
def test_tolerance_is_some_units_in_the_last_place(precision: Precision) -> None:
    """Of a well-conditioned training, rounding moves every parameter by more than eps and less than a few thousand."""
    found = reference(replace(TRAINING, precision=precision))
    eps = np.finfo(precision.value).eps

    relative = [moment.tolerances / moment.norms for moment in found.moments if moment.phase is Phase.UPDATE]

    assert found.doubt == ""
    assert np.min(relative) >= 4 * eps
    assert np.max(relative) < 5000 * eps


def test_more_perturbations_raise_the_floor_a_little() -> None:
    """The many runs that confirm a divergence estimate the same spread as the few before them."""
    quick, sure = reference(TRAINING), confirming_reference(TRAINING, 2)

    for few, many in zip(quick.moments, sure.moments, strict=True):
        assert (many.tolerances >= 0.5 * few.tolerances).all()
        assert (many.tolerances <= 10 * few.tolerances).all()


def test_a_training_that_blows_up_proves_nothing() -> None:
    """A reference with values that are not finite is in doubt."""
    assert "not finite" in reference(replace(TRAINING, optimizer=SGD(lr=1e300))).doubt


def test_a_dead_network_proves_nothing() -> None:
    """All-zero gradients agree with any layout, so a reference with nothing else is in doubt."""
    layer = Layer(width=1, bias=False, norm=Norm.LAYER, activation=Activation.RELU)
    often_dead = replace(TRAINING, model=Model(features=1, layers=(layer,)), steps=1)

    doubts = {reference(replace(often_dead, seed=seed)).doubt for seed in range(20)}

    assert "every gradient of the reference is zero" in doubts
    assert len(doubts) > 1


def test_a_floor_of_more_than_half_the_digits_proves_nothing() -> None:
    """A tensor that rounding alone can move by more than sqrt(eps) of its kind puts the reference in doubt, by name."""
    moments = reference(TRAINING).moments
    row = next(index for index, moment in enumerate(moments) if moment.phase is Phase.UPDATE)
    noisy = moments[row]
    loud = replace(noisy, tolerances=noisy.tolerances + 1e-7 * noisy.scales)

    limit = noise_limit(TRAINING)
    assert doubt_about(moments, limit) == ""
    assert noisy.table.names[0] in doubt_about((*moments[:row], loud, *moments[row + 1 :]), limit)
