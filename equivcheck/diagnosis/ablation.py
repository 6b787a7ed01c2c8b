"""Ablation: remove one feature from the training and see if the ranks then match one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from equivcheck.diagnosis.diverged_run import run_again
from equivcheck.errors import EquivCheckError
from equivcheck.layouts.base.limits.repairs import each_layer, has_ties, without_ties
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.scenario import Scenario
from equivcheck.training.setup import Setup
from equivcheck.worlds.ranks import Ranks


def cause_by_ablation(
    scenario: Scenario, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float
) -> Diagnosis | None:
    """Cause for the first feature whose removal makes ranks match; None if none does. Runs the ranks again per feature."""
    for plainer, cause, words in _plainer(scenario):
        try:
            if why_unsupported(plainer) is None and run_again(plainer, alter, world, deadline) is None:
                return Diagnosis(cause=cause, sentence=words, exact=False)
        except EquivCheckError:
            continue  # a plainer scenario whose ranks fail explains nothing
    return None


def _plainer(scenario: Scenario) -> Iterator[tuple[Scenario, Cause, str]]:
    training = scenario.training
    if any(layer.dropout for layer in training.model.layers):
        plain = each_layer(training, lambda _, layer: layer.with_fields(dropout=0.0))
        words = "dropout masks differ from the single-device run: without dropout your ranks match it"
        yield replace(scenario, training=plain), Cause.ANOTHER_MASK, words
    if has_ties(training.model):
        words = "a shared weight is not shared on your ranks: with a separate weight for each use they match one device"
        yield replace(scenario, training=without_ties(training)), Cause.UNTIED, words
