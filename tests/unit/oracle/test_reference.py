"""Tests for the reference and its noise floor."""

from dataclasses import replace

import numpy as np
import pytest

from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.scenario import Activation, Data, Layer, Model, Norm, Precision, Training
from equivcheck.worlds.trace.differences import Phase

TRAINING = Training(
    model=Model(features=4, layers=(Layer(width=3, activation=Activation.TANH, norm=Norm.LAYER), Layer(width=2))),
    data=Data(microbatches=(4,)),
    steps=3,
)


def test_a_reference_is_run_once() -> None:
    """Equal trainings share one cached reference."""
    assert ReferenceRun(TRAINING).reference() is ReferenceRun(replace(TRAINING)).reference()


@pytest.mark.parametrize("precision", list(Precision))
def test_tolerance_is_some_units_in_the_last_place(precision: Precision) -> None:
    """In a well-conditioned training, rounding moves every parameter by more than eps and less than a few thousand."""
    found = ReferenceRun(replace(TRAINING, precision=precision)).reference()
    eps = np.finfo(precision.value).eps

    relative = [moment.tolerances / moment.norms for moment in found.moments if moment.phase is Phase.UPDATE]

    assert found.doubt is None
    assert np.min(relative) >= 4 * eps
    assert np.max(relative) < 5000 * eps


def test_more_perturbations_raise_the_floor_a_little() -> None:
    """The many confirming runs estimate the same spread as the few first ones."""
    quick, sure = ReferenceRun(TRAINING).reference(), ReferenceRun(TRAINING, num_parts=2).confirming_reference()

    for few, many in zip(quick.moments, sure.moments, strict=True):
        assert (many.tolerances >= 0.5 * few.tolerances).all()
        assert (many.tolerances <= 10 * few.tolerances).all()
