"""Heads that predict two tokens, whose second prediction has wrong labels or a wrong count."""

from __future__ import annotations

from functools import partial

from equivcheck.mutants.mutant import ONE_RANK, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of
from equivcheck.mutants.tokens.documents import packs_documents
from equivcheck.mutants.tokens.needs import change_batches, has_loss, is_divided, length_of
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.training.documents import precedes_boundary
from equivcheck.training.labels import labels_two_ahead
from equivcheck.training.second_predictions import relabel_second, weigh_second_as_first
from equivcheck.training.setup import Setup


def predicts_two(scenario: Scenario) -> bool:
    """Whether nothing is compiled or traced, and each position has two predictions."""
    return has_loss()(scenario) and scenario.training.model.predicts_two and length_of(scenario) > 1


@fault(layouts=EVERYWHERE, applies=all_of(predicts_two, is_divided), causes=(Cause.LABEL_WEIGHTS,), minimum=ONE_RANK)
def second_prediction_counted_as_first(setup: Setup) -> None:
    """Bug: the loss for the second predicted token is divided by the number of labels for the first, which is larger."""
    change_batches(setup, partial(weigh_second_as_first, setup.training))


@fault(layouts=EVERYWHERE, applies=predicts_two, causes=(Cause.ANOTHER_LABEL,), minimum=ONE_RANK)
def second_prediction_of_next_token(setup: Setup) -> None:
    """Bug: the second prediction has the first prediction's labels, so it learns the next token instead of the one after it."""
    change_batches(setup, partial(relabel_second, setup.training, lambda labels: labels))


@fault(layouts=EVERYWHERE, applies=all_of(predicts_two, packs_documents), causes=(Cause.ANOTHER_LABEL,), minimum=ONE_RANK)
def second_prediction_crosses_documents(setup: Setup) -> None:
    """Bug: at the end of each document, the second prediction has a label from the next document."""
    no_boundaries = precedes_boundary(setup.training.model.length or 1, None)
    change_batches(setup, partial(relabel_second, setup.training, partial(labels_two_ahead, boundaries=no_boundaries)))
