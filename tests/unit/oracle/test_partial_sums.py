"""The noise floor for optimizers that scale a gradient's partial sums."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from equivcheck import Outcome, Scenario, check
from equivcheck.oracle.reference import reference as module
from equivcheck.oracle.reference.partial_sums import partial_sum_traces
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.oracle.reference.summation import split_trace
from equivcheck.scenario import (
    SPMD,
    Activation,
    Adafactor,
    Adagrad,
    Axis,
    Data,
    Implementation,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Optimizer,
    TensorParallel,
    Training,
)
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase

TRAINING = Training(
    model=Model(features=28, layers=(Layer(width=1), Layer(width=31, activation=Activation.TANH), Layer(width=31, bias=False))),
    data=Data(microbatches=(2,)),
    optimizer=Adagrad(implementation=Implementation.FOREACH),
    loss=Loss.LINEAR_MEAN,
    steps=2,
    seed=173,
)
"""Tanh saturates: a gradient of 4e-8 is the difference between two partial sums of 0.02, and no input moves it."""
LAYOUT = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(SPMD(redistribute_gradients=False),))
SCENARIO = Scenario(training=TRAINING, layout=LAYOUT)


ONE_STEP = replace(SCENARIO, training=replace(TRAINING, steps=1))
WEIGHT = "layers.2.linear.weight"


def off_by(share: float) -> Callable[[Setup], None]:
    """Let ranks add an error to a weight, relative to it, after each update."""

    def off(setup: Setup) -> None:
        update = setup.update

        def updated(optimizer: torch.optim.Optimizer) -> None:
            update(optimizer)
            with torch.no_grad():
                setup.model.get_parameter(WEIGHT).mul_(1.0 + share)

        setup.update = updated

    return off


def accepted_share() -> float:
    """Relative error in the weight that is accepted after the only update."""
    found = ReferenceRun.of(ONE_STEP).confirming_reference()
    update = next(moment for moment in found.moments if moment.phase is Phase.UPDATE)
    row = update.table.rows[WEIGHT]
    return float(update.tolerances[row] / update.norms[row])


def test_partial_sums_that_nearly_cancel_are_within_the_floor() -> None:
    """Correct ranks that divide each partial sum before the reduction pass."""
    assert check(SCENARIO).outcome is Outcome.EQUIVALENT


def test_a_floor_from_moved_inputs_alone_ignores_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between both floors passes, but is found if partial sums are ignored."""
    wide = accepted_share()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_num_partial_sums", lambda _scenario: 1)
        narrow = accepted_share()
    assert wide > 100.0 * narrow
    between = off_by(math.sqrt(wide * narrow))
    assert check(ONE_STEP, alter=between).outcome is Outcome.EQUIVALENT
    monkeypatch.setattr(module, "_num_partial_sums", lambda _scenario: 1)
    assert check(ONE_STEP, alter=between).outcome is Outcome.DIVERGED


def test_what_is_larger_than_their_rounding_is_found() -> None:
    """An error a thousand times larger than the partial sums' rounding is found."""
    assert check(SCENARIO, alter=off_by(1e-8)).outcome is Outcome.DIVERGED


@pytest.mark.parametrize(
    ("optimizer", "redistributes", "expected"),
    [
        (Adagrad(implementation=Implementation.FOREACH), False, 2),
        (Adagrad(), False, 1),
        (Adagrad(implementation=Implementation.FOREACH), True, 1),
        (Adafactor(), False, 2),
    ],
)
def test_only_optimizers_that_scale_partial_sums_count_them(optimizer: Optimizer, redistributes: bool, expected: int) -> None:
    """Other optimizers, and layouts that redistribute gradients, need no extra noise."""
    layout = replace(LAYOUT, parallelisms=(SPMD(redistribute_gradients=redistributes),))
    scenario = Scenario(training=replace(TRAINING, optimizer=optimizer), layout=layout)
    assert ReferenceRun.of(scenario).num_partial_sums == expected


def test_rows_that_ranks_cannot_share_evenly_are_split_over_data_ranks() -> None:
    """Parts with unequal sizes would be another training."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(TensorParallel(redistribute_gradients=False),))
    for rows, expected in ((2, 2), (3, 1)):
        training = replace(TRAINING, data=Data(microbatches=(rows,)))
        assert ReferenceRun.of(Scenario(training=training, layout=layout)).num_partial_sums == expected


def test_gradients_stay_as_they_are() -> None:
    """Only the update moves, by at most one unit in the last place of the partial sums."""
    split, moved = split_trace(TRAINING, 2, 2.0), partial_sum_traces(TRAINING, 2)
    for trace in moved:
        assert (trace.steps[0].gradients.values == split.steps[0].gradients.values).all()
        assert 0.0 < abs(trace.steps[0].parameters.values - split.steps[0].parameters.values).max() < 1e-11
