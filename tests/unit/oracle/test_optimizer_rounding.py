"""Tests for copies of the reference under optimizers that mix elements, or round on their way."""

from dataclasses import replace

import numpy as np
import pytest

from equivcheck.oracle import floor
from equivcheck.oracle.floor import perturbed
from equivcheck.oracle.optimizer_rounding import rounding_setup
from equivcheck.oracle.reference import noise_limit
from equivcheck.scenario import SGD, Adafactor, Data, Layer, Model, Muon, Optimizer, Precision, Training
from equivcheck.train.copies import train_copies
from equivcheck.train.ensemble import train_ensemble
from equivcheck.train.loop import train
from equivcheck.train.setup import single_device

MODEL = Model(features=4, layers=(Layer(width=3, bias=False), Layer(width=2, bias=False)))
TRAINING = Training(model=MODEL, data=Data(microbatches=(4,)), steps=2)
MUON = replace(TRAINING, optimizer=Muon())


@pytest.mark.parametrize(
    ("optimizer", "expected"), [(SGD(), "train_ensemble"), (Adafactor(), "train_copies"), (Muon(), "train_copies")]
)
def test_copies_are_trained_at_once_only_where_they_do_not_mix(
    monkeypatch: pytest.MonkeyPatch, optimizer: Optimizer, expected: str
) -> None:
    """A norm over all copies would be wrong for each, so an optimizer that takes norms trains them one by one."""
    used = []
    for function in (train_ensemble, train_copies):
        monkeypatch.setattr(floor, function.__name__, lambda *arguments, function=function: used.append(function.__name__))
    perturbed(replace(TRAINING, optimizer=optimizer), 2)
    assert used == [expected]


@pytest.mark.parametrize("optimizer", [Adafactor(), Muon()])
def test_the_first_copy_is_the_reference(optimizer: Optimizer) -> None:
    """What moves no input leaves the bits of the single-device run, also where the others are moved by rounding."""
    training = replace(TRAINING, optimizer=optimizer)
    reference, copies = train(single_device(training)), perturbed(training, 3, rounding_setup(training))
    for ours, theirs in zip(copies.steps, reference.steps, strict=True):
        assert (ours.parameters[0] == theirs.parameters.values).all()
        assert (ours.parameters[1:] != theirs.parameters.values).any(axis=1).all()


def test_rounding_inside_the_optimizer_moves_what_follows() -> None:
    """Copies move as far as bfloat16 may move an update, but not the gradients before the first one."""
    exact, rounded = perturbed(MUON, 8), perturbed(MUON, 8, rounding_setup(MUON))

    def spread(values: np.ndarray) -> float:
        return float(np.linalg.norm(values[1:] - values[0], axis=1).max() / np.linalg.norm(values[0]))

    assert spread(rounded.steps[0].gradients) < 1e-14
    assert spread(exact.steps[0].parameters) < 1e-14
    assert 1e-5 < spread(rounded.steps[0].parameters) < 1e-1


def test_what_an_optimizer_rounds_to_limits_the_noise() -> None:
    """Half of the digits are those of the coarsest type that a step computes in."""
    assert noise_limit(TRAINING) == pytest.approx(2.0**-26)
    assert noise_limit(replace(TRAINING, precision=Precision.FLOAT32)) == pytest.approx(2.0**-11.5)
    assert noise_limit(MUON) == pytest.approx(2.0**-3.5)
