"""The property behind every tolerance: honest ways to compute the same training differ by less."""

from dataclasses import replace

from hypothesis import given, settings

from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.noise import NUM_CONFIRMATIONS, expected_moments, perturbed_copies
from equivcheck.oracle.reference.optimizer_rounding import rounding_setup
from equivcheck.oracle.reference.reference import Reference, ReferenceRun, noise_limit
from equivcheck.oracle.reference.summation import split_trace
from equivcheck.scenario import Training
from equivcheck.strategies import trainings
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.threads import one_thread
from equivcheck.worlds.trace.differences import Phase

PARTS = 4
NORM_MARGIN = 2.0
"""Accepted error of a norm in units of the first tolerance, which what is clipped by it may have as well; 1.26 has been seen."""


@settings(max_examples=max(30, settings().max_examples * 3 // 10), deadline=None)
@given(trainings())
def test_a_batch_split_as_a_layout_splits_it_is_within_the_floor(training: Training) -> None:
    """The floor from perturbed inputs covers another order of summation that it has not seen, of clipping up to a factor of 2.

    A norm, by which all gradients are scaled, is one number summed over every gradient, and moves with the order of the sum
    more than with what is summed; before a divergence is believed, the split itself counts as spread.
    """
    rows = tuple(PARTS * rows for rows in training.data.microbatches)
    training = replace(training, data=replace(training.data, microbatches=rows), model=replace(training.model, counter=False))
    with one_thread():
        copies = perturbed_copies(training, NUM_CONFIRMATIONS, rounding_setup(training))
        moments = expected_moments(training, train(single_device_setup(training)), copies)
        split = split_trace(training, PARTS, float(PARTS))

    found = compare(Reference(moments, None, noise_limit(training)), [split])

    norms = {far.step: far.error for far in found.divergences if far.tensor == "norm"}
    followers = [far for far in found.divergences if far.phase is Phase.CLIPPING and far.error <= norms.get(far.step, 0.0)]
    beyond = [far for far in found.divergences if far not in followers or norms[far.step] > NORM_MARGIN]
    assert not beyond or ReferenceRun(training).reference().doubt
