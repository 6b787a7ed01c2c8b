"""The property behind every tolerance: honest ways to compute the same training differ by less."""

from dataclasses import replace

from hypothesis import given, settings

from equivcheck.oracle.compare import compare
from equivcheck.oracle.floor import NUM_CONFIRMATIONS, expected_moments, perturbed, split_trace
from equivcheck.oracle.optimizer_rounding import rounding_setup
from equivcheck.oracle.reference import Reference, reference
from equivcheck.scenario import Training
from equivcheck.strategies import trainings
from equivcheck.train.loop import train
from equivcheck.train.setup import single_device
from equivcheck.train.threads import one_thread

PARTS = 4


@settings(max_examples=max(100, settings().max_examples), deadline=None)
@given(trainings())
def test_a_batch_split_as_a_layout_splits_it_is_within_the_floor(training: Training) -> None:
    """The floor from perturbed inputs covers another order of summation that it has not seen."""
    rows = tuple(PARTS * rows for rows in training.data.microbatches)
    training = replace(training, data=replace(training.data, microbatches=rows), model=replace(training.model, counter=False))
    with one_thread():
        copies = perturbed(training, NUM_CONFIRMATIONS, rounding_setup(training))
        moments = expected_moments(training, train(single_device(training)), copies)
        split = split_trace(training, PARTS)

    found = compare(Reference(moments, ""), [split])

    assert not found.divergences or reference(training).doubt
